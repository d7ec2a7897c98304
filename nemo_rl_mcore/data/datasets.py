"""Where prompts come from: deterministic generators keyed by (seed, step), with a stable held-out share."""

from __future__ import annotations

import hashlib
import random
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Protocol

from nemo_rl_mcore.config.data import TURN_TASKS
from nemo_rl_mcore.config.shares import Shares
from nemo_rl_mcore.data.messages import NO_EXTRAS, Extras, Message
from nemo_rl_mcore.errors import RefusedError

PROMPT_END = ">"
_HELD_OUT_ONE_IN = 10
_STREAM = "nemo_rl_mcore.prompts"


@dataclass(frozen=True)
class Prompt:
    """One question with its verifiable answer."""

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
    """Special tokens of the text that the data spells: they are encoded as text, see `data.literal_text`."""
    extras: Extras = NO_EXTRAS
    """What its row has besides texts, where it is a conversation."""
    frame: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)
    """Of a plain text, see `Message.frame`."""
    unscored: str = field(default="", compare=False, repr=False)
    """Why its row states no answer to score against, where it does not."""

    @property
    def imitated(self) -> str:
        """Return the answer to imitate: the solution or, where there is none, the answer."""
        return self.answer if self.solution is None else self.solution


class PromptSource(Protocol):
    """What an algorithm draws its prompts from."""

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

    count_keys: the keys that ask for the prompts of a step and of a validation, which an error names.
    """

    def __init__(
        self, task: str, num_digits: int, seed: int, count_keys: tuple[str, str] = ("count", "count")
    ) -> None:
        if task not in (*DIGIT_TASKS, *TURN_TASKS):
            raise RefusedError(
                f"unknown task {task!r}; known tasks: {', '.join((*DIGIT_TASKS, *TURN_TASKS))}",
                code="unknown-task",
            )
        if num_digits < 1:
            raise RefusedError(f"data.num_digits must be at least 1, got {num_digits}", code="num-digits")
        self._task = task
        self._num_digits = num_digits
        hidden = num_digits // 2 if task == "guess_number" else 0
        self._index_digits = num_digits + hidden
        self._seed = seed
        self._step_key, self._validation_key = count_keys

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        """Draw without replacement within the step; ValueError when the pool is smaller than `count`."""
        order = shuffled(10**self._index_digits, key=f"train:{self._seed}:{step}")
        return self._take(order, count, held_out=False, count_key=self._step_key)

    def validation(self, count: int | None) -> list[Prompt]:
        """Give the first `count` held-out prompts of one fixed order."""
        assert count is not None  # the rules ask a number of an embedded task
        order = shuffled(10**self._index_digits, key="validation")
        return self._take(order, count, held_out=True, count_key=self._validation_key)

    def _take(self, order: Iterator[int], count: int, *, held_out: bool, count_key: str) -> list[Prompt]:
        candidates = (self._prompt(index) for index in order)
        pool = (prompt for prompt in candidates if prompt and is_held_out(prompt.text) == held_out)
        prompts = list(islice(pool, count))
        if len(prompts) < count:
            share = "held-out prompts" if held_out else "training prompts"
            raise RefusedError(
                f"{count_key}={count} exceeds the {len(prompts)} {share} that exist with "
                f"data.num_digits={self._num_digits}; lower the first or raise the second",
                code="too-few-rows",
            )
        return prompts

    def _prompt(self, index: int) -> Prompt | None:
        """Return the prompt of an index; None where it is none."""
        width = self._num_digits // 2
        match self._task:
            case "calculator":
                first, second = numbers_of(index, 2, width)
                return Prompt(
                    index,
                    f"{first}+{second}{PROMPT_END}",
                    f"{int(first) + int(second):0{self._num_digits + 1}d}",
                )
            case "guess_number":
                lowest, highest, secret = numbers_of(index, 3, width)
                if not lowest <= secret <= highest or lowest == highest:
                    return None
                return Prompt(index, f"{lowest}{highest}{PROMPT_END}", secret)
            case task:
                digits = f"{index:0{self._index_digits}d}"
                return Prompt(index, digits + PROMPT_END, DIGIT_TASKS[task](digits))


def numbers_of(index: int, count: int, width: int) -> list[str]:
    """Return the numbers of `width` digits each that the index of a prompt is made of."""
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
        return [self.train[row] for _source, row in self._rows(step, count)]

    def first_steps(self, step: int, count: int) -> Sequence[int] | None:
        """See `PromptSource.first_steps`: that of the first pass."""
        return [
            self._step_of(source, self._parts[source].first_position(row)) + 1
            for source, row in self._rows(step, count)
        ]

    def _rows(self, step: int, count: int) -> list[tuple[int, int]]:
        """Return the source and the row of each prompt of a step."""
        if count > min(self.per_step, len(self.train)):
            raise RefusedError(
                f"{count} rows of a step are more than its {self.per_step} or the {len(self.train)} of data.train",
                code="too-few-rows",
            )
        first, before = (step - 1) * self.per_step, self._shares.before
        rows = [
            map(part.row, range(before(source, first), before(source, first + count)))
            for source, part in enumerate(self._parts)
        ]
        turns = [self._shares.turn(position) for position in range(first, first + count)]
        return [(turn, next(rows[turn])) for turn in turns]

    def validation(self, count: int | None) -> list[Prompt]:
        """Give the first held-out prompts, all where they are fewer."""
        return list(self.held_out[:count])

    @cached_property
    def _shares(self) -> Shares:
        return Shares(self.weights or {"": 1.0})

    @cached_property
    def _parts(self) -> list[_Passes]:
        if self.weights is None:
            rows: dict[str, Sequence[int]] = {"": range(len(self.train))}
        else:
            of_source = {name: array("I") for name in self.weights}
            for row, prompt in enumerate(self.train):
                of_source[prompt.source].append(row)
            rows = {f":{name}": found for name, found in of_source.items()}

        def step_around(source: int, position: int) -> tuple[int, int]:
            step = self._step_of(source, position)
            return self._begin(source, step), self._begin(source, step + 1)

        seed = self.seed if self.shuffle else None
        return [
            _Passes(found, seed, key, partial(step_around, source))
            for source, (key, found) in enumerate(rows.items())
        ]

    def _step_of(self, source: int, position: int) -> int:
        """Return the step, counted from 0, that takes the row at a position of a source's passes."""
        most = (position + 2) * self._shares.period // self.per_step + 1
        return bisect_right(range(most), position, key=partial(self._begin, source)) - 1

    def _begin(self, source: int, step: int) -> int:
        return self._shares.before(source, step * self.per_step)


@dataclass(frozen=True)
class _Passes:
    """The rows of a source, pass after pass; `step_around` gives the first position of a step, and the end of it.

    seed: of the orders; None takes each pass as the rows lie. key: what sets the orders apart from those of other
    sources.
    """

    rows: Sequence[int]
    seed: int | None
    key: str
    step_around: Callable[[int], tuple[int, int]]
    _orders: list[array[int]] = field(default_factory=list["array[int]"], init=False, repr=False)
    _first: array[int] = field(default_factory=lambda: array("I"), init=False, repr=False)

    def row(self, position: int) -> int:
        """Return the row at a position of the passes."""
        epoch, place = divmod(position, len(self.rows))
        while len(self._orders) <= epoch:
            self._orders.append(self._order(len(self._orders)))
        return self.rows[self._orders[epoch][place]]

    def first_position(self, row: int) -> int:
        """Return the position of a row in the first pass."""
        if not self._orders:
            self._orders.append(self._order(0))
        if not self._first:
            self._first.extend(self._orders[0])
            for position, place in enumerate(self._orders[0]):
                self._first[place] = position
        return self._first[bisect_left(self.rows, row)]

    def _order(self, epoch: int) -> array[int]:
        rows = len(self.rows)
        if self.seed is None:
            return array("I", range(rows))  # in which no step that ends in the next pass has a row twice
        order = array("I", shuffled(rows, f"epoch:{self.seed}:{epoch}{self.key}"))
        begin, end = self.step_around(epoch * rows)
        begun = epoch * rows - begin
        if not begun:
            return order
        behind = set(self._orders[epoch - 1][-begun:])
        head = array("I", islice((row for row in order if row not in behind), end - epoch * rows))
        ahead = set(head)
        return head + array("I", (row for row in order if row not in ahead))
