"""`Prompt`, the record of a row, and two sources of prompts: embedded tasks and rows."""

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
    """A row of data: a question with its answers."""

    index: int
    """Stable id in the data source; keys the sampling noise."""
    text: str
    answer: str
    """The answer to score against."""
    rejected: str | None = None
    """The worse answer of a pair."""
    context: tuple[Message, ...] = ()
    """The conversation, which a chat template renders as `text`; empty for a plain text."""
    imitate_all: bool = False
    """Train on every assistant turn of the context, too."""
    solution: str | None = None
    """The text to train on in place of `answer`, such as the steps to it."""
    source: str = ""
    """The source's name, if there are several."""
    env_name: str = ""
    """The section of `env` that scores the answers, if there are several."""
    place: str = field(default="", compare=False)
    """File and line, for messages."""
    columns: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    """Further columns of the row, for reward functions."""
    literal: tuple[tuple[int, int], ...] = ()
    """Spans of special tokens in `text` that stay text when it is encoded."""
    tools: Tools = field(default=(), hash=False)
    """Functions that answers may call."""
    answer_message: Message | None = None
    """The answer to train on, if it has more than text."""
    rejected_message: Message | None = None
    own_turn: bool = False
    """Answers are new messages; else they continue an assistant's message at the end of the context."""
    frame: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)
    """As `Message.frame`, of a plain text."""
    unscored: str = field(default="", compare=False, repr=False)
    """The reason for a missing `answer`; empty if there is one."""

    @property
    def imitated(self) -> str:
        return self.answer if self.solution is None else self.solution


class PromptSource(Protocol):
    def train_batch(self, step: int, count: int) -> list[Prompt]:
        """Draw `count` different prompts; the same (seed, step) gives the same prompts."""
        ...

    def validation(self, count: int | None) -> list[Prompt]:
        """Return `count` held-out prompts, the same at every call and for every seed; None: all (rows only)."""
        ...

    def first_steps(self, step: int, count: int) -> Sequence[int] | None:
        """Return the first step that draws each prompt of `train_batch(step, count)`; None without passes."""
        return None


DIGIT_TASKS: dict[str, Callable[[str], str]] = {
    "copy": lambda digits: digits,
    "reverse": lambda digits: digits[::-1],
    "sort": lambda digits: "".join(sorted(digits)),
    "increment": lambda digits: "".join(str((int(digit) + 1) % 10) for digit in digits),
}
"""From a string of digits to its answer."""


class DigitTaskSource(PromptSource):
    """All strings of `num_digits` digits with the task's answer: copy of "527>" is "527".

    calculator: the prompt is two numbers, "37+25>", the answer their sum, "00062". guess_number: the prompt is two
    bounds, "27>", once for each number between them, which is the answer.

    A hash of the text selects a held-out tenth, the same for every seed and every single-answer task: a model trained
    on one task and then on another never sees a validation prompt.

    count_keys: keys for errors, of a step's and a validation's number of prompts. show: renders a prompt for the model.
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
        return self._take(f"train:{self._seed}:{step}", count, held_out=False)

    def validation(self, count: int | None) -> list[Prompt]:
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
    """Yield 0..size-1 in a random order seeded by `key`: Fisher-Yates that stores only moved entries."""
    generator = random.Random(f"{_STREAM}:{key}")
    moved: dict[int, int] = {}
    for position in range(size):
        chosen = generator.randrange(position, size)
        yield moved.get(chosen, chosen)
        moved[chosen] = moved.pop(position, position)


@dataclass
class EpochSource(PromptSource):
    """Passes over rows, each in its own random order; a step takes the next `per_step` rows.

    A step may begin in one pass and end in the next. No row occurs twice in a step: a repeated row waits for the next
    step.

    weights: each source's relative probability of giving the next row; null: one pass over all sources' rows.
    shuffle: false keeps the rows' order in each pass.
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
        return [self.train[row] for row in self._step(step, count)]

    def first_steps(self, step: int, count: int) -> Sequence[int] | None:
        return [self._first[row] for row in self._step(step, count)]

    def validation(self, count: int | None) -> list[Prompt]:
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
        """Yield each step's rows, from the first step on."""
        names = [""] if self.weights is None else [*self.weights]
        rows = {name: array("I") for name in names}
        for row, prompt in enumerate(self.train):
            rows["" if self.weights is None else prompt.source].append(row)

        def passes(name: str) -> Iterator[int]:
            size = len(rows[name])
            for number in count_up():
                key = f"epoch:{self.seed}:{number}{'' if self.weights is None else f':{name}'}"
                order = shuffled(size, key) if self.shuffle else range(size)
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
                if not left[name]:  # the step has all of this source's rows
                    continue
                left[name] -= 1
                while (row := waiting[name].popleft() if waiting[name] else next(coming[name])) in step:
                    passed_over[name].append(row)
                step[row] = None
            for name, later in passed_over.items():
                waiting[name].extendleft(reversed(later))
            yield array("I", step)
