"""Prompts that are all there: shuffled again for every pass, or in their order, each taken once a pass."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice

from nemo_rl_mcore.config.shares import Shares
from nemo_rl_mcore.data.datasets import Prompt, PromptSource, shuffled
from nemo_rl_mcore.errors import RefusedError


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
        first = (step - 1) * self.per_step
        rows = [iter(self._rows_of(source, first, first + count)) for source in range(len(self._parts))]
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
            return [self._passes(0, range(len(self.train)), "")]
        rows = {name: array("I") for name in self.weights}
        for row, prompt in enumerate(self.train):
            rows[prompt.source].append(row)
        return [self._passes(source, rows[name], f":{name}") for source, name in enumerate(rows)]

    def _passes(self, source: int, rows: Sequence[int], key: str) -> _Passes:
        seed = self.seed if self.shuffle else None
        return _Passes(rows, seed, key, lambda position: self._step_around(source, position))

    def _step_around(self, source: int, position: int) -> tuple[int, int]:
        """Return the bounds of the rows that a step takes of a source, counted through its passes."""
        step = self._step_of(source, position)
        return self._begin(source, step), self._begin(source, step + 1)

    def _step_of(self, source: int, position: int) -> int:
        """Return the step, counted from 0, that takes the row at a position of a source's passes."""
        most = (position + 2) * self._shares.period // self.per_step + 1
        return bisect_right(range(most), position, key=partial(self._begin, source)) - 1

    def _begin(self, source: int, step: int) -> int:
        return self._shares.before(source, step * self.per_step)

    def _rows_of(self, source: int, first: int, end: int) -> list[int]:
        before = self._shares.before
        part = self._parts[source]
        return [part.row(position) for position in range(before(source, first), before(source, end))]


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
