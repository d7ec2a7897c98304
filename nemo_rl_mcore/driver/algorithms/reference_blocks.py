"""The reference's log-probabilities of given answers, which come again with every pass over the data set.

The last bits of a row's numbers depend on what passes through the model with it: its neighbours, their widths, how they
are packed, the rank that has it. So a row is always computed in the same block of rows, and the numbers are the same
whether they were kept or are computed again, as a resumed run has to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.preference import PreferenceSource
from nemo_rl_mcore.losses import DPOLossFn

KEPT_BYTES = 2**30
"""The memory of the driver for what is kept, at 4 bytes a token: 131,000 pairs of two answers of 1,024 tokens."""

_PAIR = DPOLossFn.rows_per_sample
Block = Mapping[int, list[torch.Tensor]]
"""The rows of each pair by its prompt_index, [tokens of the row] each."""


@dataclass
class ReferenceBlocks:
    """A pair's block is the batch of the step that draws it first, as long as KEPT_BYTES hold the blocks up to it.

    Later passes then ask for nothing. A run that is resumed in one of them asks for each block once more, when it first
    meets a pair of it. Pairs of the other blocks, and those of a source without passes, are asked for at every step, in
    the batch of that step.

    ask: gives the reference's log-probabilities [B, S] of a batch, 0 where token_mask is.
    count: pairs of a step. longest: tokens of a row at most.
    """

    pairs: PreferenceSource
    ask: Callable[[BatchedDataDict], torch.Tensor]
    count: int
    longest: int
    _kept: dict[int, Block] = field(default_factory=dict[int, Block], init=False, repr=False)
    _held_out: dict[tuple[int, ...], torch.Tensor] = field(
        default_factory=dict[tuple[int, ...], torch.Tensor], init=False, repr=False
    )

    def of_step(self, step: int, batch: BatchedDataDict) -> torch.Tensor:
        """Return [B, S], of the pairs that a step takes: those of `batch`."""
        first = self.pairs.first_steps(step, self.count)
        if first is None:
            return self.ask(batch)
        of_pair = [block if block <= self._kept_steps() else step for block in first]
        blocks = {number: self._block(number, step, batch) for number in sorted({*of_pair})}
        indices: list[int] = batch["prompt_index"].tolist()
        found = torch.zeros(batch["input_ids"].shape)
        for row, index in enumerate(indices):
            logprobs = blocks[of_pair[row // _PAIR]][index][row % _PAIR]
            found[row, : len(logprobs)] = logprobs
        return found

    def of_validation(self, batch: BatchedDataDict) -> torch.Tensor:
        """Return [B, S], of a batch of held-out pairs, which are the same ones at every validation."""
        pairs = tuple[int, ...](batch["prompt_index"].tolist())
        if pairs in self._held_out:
            return self._held_out[pairs]
        found = self.ask(batch)
        if sum(kept.nbytes for kept in (*self._held_out.values(), found)) <= KEPT_BYTES:
            self._held_out[pairs] = found
        return found

    def _kept_steps(self) -> int:
        """Return how many blocks are kept at most."""
        return KEPT_BYTES // (self.count * _PAIR * self.longest * torch.float32.itemsize)

    def _block(self, number: int, step: int, batch: BatchedDataDict) -> Block:
        if number in self._kept:
            return self._kept[number]
        block = _by_pair(batch, self.ask(batch)) if number == step else self._asked_anew(number)
        if number <= self._kept_steps():
            self._kept[number] = block
        return block

    def _asked_anew(self, number: int) -> Block:
        batch = self.pairs.train_batch(number, self.count)
        return _by_pair(batch, self.ask(batch))


def _by_pair(batch: BatchedDataDict, logprobs: torch.Tensor) -> Block:
    rows: dict[int, list[torch.Tensor]] = {}
    lengths: list[int] = batch["input_lengths"].tolist()
    indices: list[int] = batch["prompt_index"].tolist()
    for index, length, values in zip(indices, lengths, logprobs, strict=True):
        rows.setdefault(index, []).append(values[:length].clone())
    return rows
