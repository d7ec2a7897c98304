"""A row as all of the package knows it, `Prompt`, and where prompts come from: tasks without files, rows in passes."""

from __future__ import annotations

import hashlib
import random
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Protocol

from nemo_rl_mcore.config.data import TURN_TASKS
from nemo_rl_mcore.config.shares import Shares
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
    """What a response is scored against."""
    rejected: str | None = None
    """The answer to move away from, where the data set has pairs."""
    context: tuple[Message, ...] = ()
    """The conversation that the text is rendered from by a chat template; empty where the text is plain."""
    imitate_all: bool = False
    """Every assistant turn of the context is to be imitated, not the answer alone."""
    solution: str | None = None
    """What is imitated, where that is more than the answer, such as the steps that lead to it."""
    source: str = ""
    """The name of its source, where there are several."""
    place: str = field(default="", compare=False)
    """Where the data source has it, such as a file and its line, for messages alone."""
    columns: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    """Further columns of its row, which reward functions read."""
    literal: tuple[tuple[int, int], ...] = ()
    """Special tokens of the text that the data spells, which are encoded as text."""
    tools: Tools = field(default=(), hash=False)
    """Functions that its answers may call."""
    answer_message: Message | None = None
    """What is imitated, where that has more than text."""
    rejected_message: Message | None = None
    own_turn: bool = False
    """Answers are turns of their own; else they go on with an assistant's message that the context ends with."""
    frame: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)
    """Of a plain text, as `Message.frame`."""
    unscored: str = field(default="", compare=False, repr=False)
    """Why its row states no answer to score against, where it does not."""

    @property
    def imitated(self) -> str:
        """The solution or, where there is none, the answer."""
        return self.answer if self.solution is None else self.solution


class PromptSource(Protocol):
    def train_batch(self, step: int, count: int) -> list[Prompt]:
        """Draw `count` different prompts; the same (seed, step) gives the same prompts."""
        ...

    def validation(self, count: int | None) -> list[Prompt]:
        """Give `count` held-out prompts, the same ones at every call and for every seed.

        None is all of them, which a recipe asks of files alone.
        """
        ...

    def first_steps(self, step: int, count: int) -> Sequence[int] | None:
        """Return, of each prompt of `train_batch(step, count)`, the first step that draws it.

        None where the source has no passes, so that nobody knows which prompts come again.
        """
        return None


DIGIT_TASKS: dict[str, Callable[[str], str]] = {
    "copy": lambda digits: digits,
    "reverse": lambda digits: digits[::-1],
    "sort": lambda digits: "".join(sorted(digits)),
    "increment": lambda digits: "".join(str((int(digit) + 1) % 10) for digit in digits),
}
"""The answer to a string of digits."""


class DigitTaskSource(PromptSource):
    """All strings of `num_digits` digits with the answer that the task defines: copy of "527>" is "527".

    calculator: the digits are two numbers, "37+25>", and the answer is their sum, of as many places as the question:
    "00062". guess_number: they are two bounds, and there is a prompt "27>" for each number from the one to the other,
    which is the answer.

    A tenth is held out by a hash of the text, the same tenth for every task of one answer and every seed, so that a
    model trained on one task and then another never sees a validation prompt.

    count_keys: the keys that ask for the prompts of a step and of a validation, which an error names. show: prompts as
    the model sees them.
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
        self._index_digits = num_digits + (num_digits // 2 if task == "guess_number" else 0)
        self._count_keys, self._show = count_keys, show

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        """Draw without replacement within the step; ValueError when the pool is smaller than `count`."""
        return self._take(f"train:{self._seed}:{step}", count, held_out=False)

    def validation(self, count: int | None) -> list[Prompt]:
        """Give the first `count` held-out prompts of one fixed order."""
        assert count is not None  # the rules ask a number of an embedded task
        return self._take("validation", count, held_out=True)

    def _take(self, key: str, count: int, *, held_out: bool) -> list[Prompt]:
        candidates = map(self._prompt, shuffled(10**self._index_digits, key))
        pool = (prompt for prompt in candidates if prompt and is_held_out(prompt.text) == held_out)
        prompts = list(islice(pool, count))
        if len(prompts) < count:
            share = "held-out prompts" if held_out else "training prompts"
            raise RefusedError(
                f"{self._count_keys[held_out]}={count} exceeds the {len(prompts)} {share} that exist with "
                f"data.num_digits={self._num_digits}; lower the first or raise the second",
                code="too-few-rows",
            )
        return [*map(self._show, prompts)] if self._show else prompts

    def _prompt(self, index: int) -> Prompt | None:
        width = self._num_digits // 2
        if self._task == "calculator":
            first, second = numbers_of(index, 2, width)
            total = f"{int(first) + int(second):0{self._num_digits + 1}d}"
            return Prompt(index, f"{first}+{second}{PROMPT_END}", total)
        if self._task == "guess_number":
            lowest, highest, secret = numbers_of(index, 3, width)
            if not lowest <= secret <= highest or lowest == highest:
                return None
            return Prompt(index, f"{lowest}{highest}{PROMPT_END}", secret)
        digits = f"{index:0{self._index_digits}d}"
        return Prompt(index, digits + PROMPT_END, DIGIT_TASKS[self._task](digits))


def numbers_of(index: int, count: int, width: int) -> list[str]:
    digits = f"{index:0{count * width}d}"
    return [digits[start : start + width] for start in range(0, count * width, width)]


def is_held_out(text: str) -> bool:
    """Tell whether a prompt belongs to the held-out tenth; depends on the text alone."""
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


@dataclass(frozen=True)
class EpochSource(PromptSource):
    """A `PromptSource` over lists of prompts; a step takes the next `per_step` rows of the passes.

    Where `per_step` does not divide the rows, a step begins in one pass and ends in the next. Such a step holds no row
    twice either: the next pass begins with rows that the last one has not just ended with.

    weights: by the name of their source, what share of the prompts its rows are; each source then has passes of its
    own. Null takes the rows of all sources alike. shuffle: false takes the rows of each pass in their order.
    """

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    seed: int
    per_step: int
    weights: Mapping[str, float] | None = None
    shuffle: bool = True

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        """Give the first `count` of the step's rows; raises ValueError where the data set, or a step, has fewer."""
        return [self.train[row] for _, row in self._rows(step, count)]

    def first_steps(self, step: int, count: int) -> Sequence[int] | None:
        return [passes.first_step(row) for passes, row in self._rows(step, count)]

    def validation(self, count: int | None) -> list[Prompt]:
        """Give the first held-out prompts, all where they are fewer."""
        return list(self.held_out[:count])

    def _rows(self, step: int, count: int) -> list[tuple[_Passes, int]]:
        """Return the row of each prompt of a step, and the passes that it is from."""
        if count > min(self.per_step, len(self.train)):
            what = f"{count} rows of a step are more than its {self.per_step} or the {len(self.train)} of data.train"
            raise RefusedError(what, code="too-few-rows")
        passes, first, found = self._passes, (step - 1) * self.per_step, list[tuple[_Passes, int]]()
        positions = [one.begin(step - 1) for one in passes]
        for turn in map(passes[0].shares.turn, range(first, first + count)):
            epoch, place = divmod(positions[turn], len(passes[turn].rows))
            found.append((passes[turn], passes[turn].rows[passes[turn].order(epoch)[place]]))
            positions[turn] += 1
        return found

    @cached_property
    def _passes(self) -> list[_Passes]:
        rows: dict[str, Sequence[int]] = {"": range(len(self.train))}
        if self.weights is not None:
            of_source = {name: array("I") for name in self.weights}
            for row, prompt in enumerate(self.train):
                of_source[prompt.source].append(row)
            rows = {f":{name}": found for name, found in of_source.items()}
        shares, seed = Shares(self.weights or {"": 1.0}), self.seed if self.shuffle else None
        return [
            _Passes(found, seed, key, shares, source, self.per_step)
            for source, (key, found) in enumerate(rows.items())
        ]


@dataclass(frozen=True)
class _Passes:
    """The rows of a source, pass after pass.

    seed: of the orders; None takes each pass as the rows lie. key: what sets the orders apart from those of other
    sources. source: its place among the shares.
    """

    rows: Sequence[int]
    seed: int | None
    key: str
    shares: Shares
    source: int
    per_step: int
    _orders: list[array[int]] = field(default_factory=list["array[int]"], init=False, repr=False)
    _first: array[int] = field(default_factory=lambda: array("I"), init=False, repr=False)

    def begin(self, step: int) -> int:
        return self.shares.before(self.source, step * self.per_step)

    def _step_of(self, position: int) -> int:
        """Return the step, counted from 0, that takes the row at a position."""
        most = (position + 2) * self.shares.period // self.per_step + 1
        return bisect_right(range(most), position, key=self.begin) - 1

    def first_step(self, row: int) -> int:
        """Return the step, counted from 1, that takes a row in the first pass."""
        order = self.order(0)
        if not self._first:
            self._first.extend(order)
            for position, place in enumerate(order):
                self._first[place] = position
        return self._step_of(self._first[bisect_left(self.rows, row)]) + 1

    def order(self, epoch: int) -> array[int]:
        """Return the order of a pass, whose first step has no row that it has of the pass before."""
        rows = len(self.rows)
        while (number := len(self._orders)) <= epoch:
            order = array("I", range(rows))
            if self.seed is not None:
                order = array("I", shuffled(rows, f"epoch:{self.seed}:{number}{self.key}"))
                step = self._step_of(number * rows)
                if begun := number * rows - self.begin(step):
                    behind = set(self._orders[number - 1][-begun:])
                    fresh = (row for row in order if row not in behind)
                    head = array("I", islice(fresh, self.begin(step + 1) - number * rows))
                    ahead = set(head)
                    order = head + array("I", (row for row in order if row not in ahead))
            self._orders.append(order)
        return self._orders[epoch]
