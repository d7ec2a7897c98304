"""Prompts that are all there: shuffled anew for every pass, each taken once a pass."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from nemo_rl_mcore.data.datasets import Prompt, shuffled


@dataclass(frozen=True)
class EpochSource:
    """A `PromptSource` over lists of prompts; a step takes the next `per_step` rows of the passes.

    Where `per_step` does not divide the rows, a step begins in one pass and ends in the next. Such a step holds no row
    twice either: the next pass begins with rows that the last one has not just ended with.
    """

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    seed: int
    per_step: int
    _orders: list[array[int]] = field(default_factory=list["array[int]"], init=False, repr=False)

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        """Give the step's rows; beyond `per_step`, rows of any pass that are drawn for this step, none of them twice.

        Raises ValueError when the data set has fewer rows than `count`.
        """
        if count > len(self.train):
            raise ValueError(f"{count} rows of a step are more than the {len(self.train)} of data.train")
        first = (step - 1) * self.per_step
        rows = [self._row(position) for position in range(first, first + min(count, self.per_step))]
        taken = set(rows)
        others = (row for row in shuffled(len(self.train), f"more:{self.seed}:{step}") if row not in taken)
        rows += islice(others, count - len(rows))
        return [self.train[row] for row in rows]

    def validation(self, count: int) -> list[Prompt]:
        """Give the first held-out prompts."""
        if count > len(self.held_out):
            raise ValueError(f"{count} rows of a validation are more than the {len(self.held_out)} held out")
        return list(self.held_out[:count])

    def _row(self, position: int) -> int:
        epoch, place = divmod(position, len(self.train))
        while len(self._orders) <= epoch:
            self._orders.append(self._order(len(self._orders)))
        return self._orders[epoch][place]

    def _order(self, epoch: int) -> array[int]:
        rows = len(self.train)
        order = array("I", shuffled(rows, f"epoch:{self.seed}:{epoch}"))
        begun = epoch * rows % self.per_step
        if not begun:
            return order
        behind = set(self._orders[epoch - 1][-begun:])
        head = array("I", islice((row for row in order if row not in behind), self.per_step - begun))
        ahead = set(head)
        return head + array("I", (row for row in order if row not in ahead))
