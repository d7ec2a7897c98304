"""`Prompt`, the record of a row, and two sources of prompts: embedded tasks, and rows in passes."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count as count_up
from typing import Protocol

from nemo_rl_mcore.config.data import TURN_TASKS
from nemo_rl_mcore.data.messages import Message, Tools
from nemo_rl_mcore.errors import RefusedError

PROMPT_END = ">"
_HELD_OUT_ONE_IN = 10
_STREAM = "nemo_rl_mcore.prompts"


@dataclass(frozen=True)
class Prompt:
    """A row: one question with its answers."""

    index: int
    """Stable id in the data source; the key of the sampling noise."""
    text: str
    answer: str
    """Scored against."""
    rejected: str | None = None
    """The answer to move away from, where the data set has pairs."""
    context: tuple[Message, ...] = ()
    """The conversation that a chat template renders as `text`; empty where the text is plain."""
    imitate_all: bool = False
    """Every assistant turn of the context is to be imitated, not the answer alone."""
    solution: str | None = None
    """Imitated in place of the answer, such as the steps that lead to it."""
    source: str = ""
    """The source's name, where there are several."""
    place: str = field(default="", compare=False)
    """File and line, or the like; read by messages alone."""
    columns: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    """Further columns of the row, for reward functions."""
    literal: tuple[tuple[int, int], ...] = ()
    """Special tokens of the text that the data spells, which are encoded as text."""
    tools: Tools = field(default=(), hash=False)
    """Functions that its answers may call."""
    answer_message: Message | None = None
    """The imitated answer, where it has more than text."""
    rejected_message: Message | None = None
    own_turn: bool = False
    """Answers are turns of their own; else they go on with an assistant's message that the context ends with."""
    frame: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)
    """Of a plain text, as `Message.frame`."""
    unscored: str = field(default="", compare=False, repr=False)
    """The reason why there is no answer to score against; empty where there is one."""

    @property
    def imitated(self) -> str:
        return self.answer if self.solution is None else self.solution


class PromptSource(Protocol):
    def train_batch(self, step: int, count: int) -> list[Prompt]:
        """Draw `count` different prompts; the same (seed, step) gives the same prompts."""
        ...

    def validation(self, count: int | None) -> list[Prompt]:
        """Give `count` held-out prompts, the same ones at every call and for every seed.

        None stands for all of them, which only sources of rows can give.
        """
        ...

    def first_steps(self, step: int, count: int) -> Sequence[int] | None:
        """Return, for each prompt of `train_batch(step, count)`, the first step that draws it; None without passes."""
        return None


DIGIT_TASKS: dict[str, Callable[[str], str]] = {
    "copy": lambda digits: digits,
    "reverse": lambda digits: digits[::-1],
    "sort": lambda digits: "".join(sorted(digits)),
    "increment": lambda digits: "".join(str((int(digit) + 1) % 10) for digit in digits),
}
"""The answer to a string of digits."""


class DigitTaskSource(PromptSource):
    """All strings of `num_digits` digits with the task's answer: copy of "527>" is "527".

    calculator: the digits are two numbers, "37+25>", and the answer is their sum, "00062". guess_number: they are two
    bounds, and each number between them has a prompt "27>" of which it is the answer.

    A tenth is held out by a hash of the text, the same tenth for every task of one answer and every seed, so that a
    model trained on one task and then another never sees a validation prompt.

    count_keys: the keys of the numbers of prompts in a step and in a validation, for errors. show: turns a prompt into
    the one that the model sees.
    """

    def __init__(
        self,
        task: str,
        num_digits: int,
        seed: int,
        count_keys: tuple[str, str] = ("count", "count"),
        show: Callable[[Prompt], Prompt] | None = None,
    ) -> None:
        if task not in (*DIGIT_TASKS, *TURN_TASKS):
            known = ", ".join((*DIGIT_TASKS, *TURN_TASKS))
            raise RefusedError(f"unknown task {task!r}; known tasks: {known}", code="unknown-task")
        if num_digits < 1:
            raise RefusedError(f"data.num_digits must be at least 1, got {num_digits}", code="num-digits")
        self._task, self._num_digits, self._seed = task, num_digits, seed
        self._count_keys, self._show = count_keys, show

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        """Draw without replacement within the step; ValueError when the pool is smaller than `count`."""
        return self._take(f"train:{self._seed}:{step}", count, held_out=False)

    def validation(self, count: int | None) -> list[Prompt]:
        """Give the first `count` held-out prompts of one fixed order."""
        assert count is not None  # a rule demands a number for an embedded task
        return self._take("validation", count, held_out=True)

    def _take(self, key: str, count: int, *, held_out: bool) -> list[Prompt]:
        digits, width = self._num_digits, self._num_digits // 2
        prompts = list[Prompt]()
        for index in shuffled(10 ** (digits + width if self._task == "guess_number" else digits), key):
            if len(prompts) == count:
                break
            if self._task == "calculator":
                first, second = numbers_of(index, 2, width)
                text, answer = f"{first}+{second}", f"{int(first) + int(second):0{digits + 1}d}"
            elif self._task == "guess_number":
                lowest, highest, answer = numbers_of(index, 3, width)
                if not lowest <= answer <= highest or lowest == highest:
                    continue
                text = lowest + highest
            else:
                text = f"{index:0{digits}d}"
                answer = DIGIT_TASKS[self._task](text)
            if is_held_out(text + PROMPT_END) == held_out:
                prompts.append(Prompt(index, text + PROMPT_END, answer))
        if len(prompts) < count:
            share = "held-out prompts" if held_out else "training prompts"
            raise RefusedError(
                f"{self._count_keys[held_out]}={count} exceeds the {len(prompts)} {share} that exist with "
                f"data.num_digits={digits}; lower the first or raise the second",
                code="too-few-rows",
            )
        return [*map(self._show, prompts)] if self._show else prompts


def numbers_of(index: int, count: int, width: int) -> list[str]:
    digits = f"{index:0{count * width}d}"
    return [digits[start : start + width] for start in range(0, count * width, width)]


def is_held_out(text: str) -> bool:
    digest = hashlib.sha256(f"held-out:{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0


def shuffled(size: int, key: str) -> Iterator[int]:
    """Yield 0..size-1 in a random order set by `key`: Fisher-Yates, storing only the entries it moved."""
    generator = random.Random(f"{_STREAM}:{key}")
    moved: dict[int, int] = {}
    for position in range(size):
        chosen = generator.randrange(position, size)
        yield moved.get(chosen, chosen)
        moved[chosen] = moved.pop(position, position)


@dataclass
class EpochSource(PromptSource):
    """Rows in passes, each in a random order of its own; a step takes the next `per_step` rows.

    Where `per_step` does not divide the rows, a step begins in one pass and ends in the next. Such a step holds no row
    twice either: a row of the next pass that the step already has waits for the step after it.

    weights: by source, in proportion to the probability that the next row is one of its passes; null joins the rows of
    all sources. shuffle: false takes the rows of each pass in their order.
    """

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    seed: int
    per_step: int
    weights: Mapping[str, float] | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        self._steps, self._first = list[array[int]](), array("I", [0]) * len(self.train)
        self._drawn = self._draw()

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        """Give the first `count` of the step's rows; raises ValueError where the data set, or a step, has fewer."""
        return [self.train[row] for row in self._step(step, count)]

    def first_steps(self, step: int, count: int) -> Sequence[int] | None:
        return [self._first[row] for row in self._step(step, count)]

    def validation(self, count: int | None) -> list[Prompt]:
        """Give the first held-out prompts, all where they are fewer."""
        return list(self.held_out[:count])

    def _step(self, step: int, count: int) -> Sequence[int]:
        if count > min(self.per_step, len(self.train)):
            what = f"{count} rows of a step are more than its {self.per_step} or the {len(self.train)} of data.train"
            raise RefusedError(what, code="too-few-rows")
        while len(self._steps) < step:
            self._steps.append(next(self._drawn))
            for row in self._steps[-1]:
                self._first[row] = self._first[row] or len(self._steps)
        return self._steps[step - 1][:count]

    def _draw(self) -> Iterator[array[int]]:
        """Yield the rows of each step, from the first step on."""
        names = [""] if self.weights is None else [*self.weights]
        rows = {name: array("I") for name in names}
        for row, prompt in enumerate(self.train):
            rows["" if self.weights is None else prompt.source].append(row)

        def passes(name: str) -> Iterator[int]:
            size, key = len(rows[name]), "" if self.weights is None else f":{name}"
            for number in count_up():
                order = shuffled(size, f"epoch:{self.seed}:{number}{key}") if self.shuffle else range(size)
                yield from map(rows[name].__getitem__, order)

        coming = {name: passes(name) for name in names}
        waiting = {name: deque[int]() for name in names}
        chance = random.Random(f"{_STREAM}:mixture:{self.seed}")
        weights = [*(self.weights or {}).values()]
        while True:
            step, passed_over = dict[int, None](), {name: list[int]() for name in names}
            left = {name: len(found) for name, found in rows.items()}
            while len(step) < min(self.per_step, len(self.train)):
                name = chance.choices(names, weights)[0] if weights else ""
                if not left[name]:  # the step has all rows of this source
                    continue
                left[name] -= 1
                while (row := waiting[name].popleft() if waiting[name] else next(coming[name])) in step:
                    passed_over[name].append(row)
                step[row] = None
            for name, later in passed_over.items():
                waiting[name].extendleft(reversed(later))
            yield array("I", step)
