"""Process groups for the kernels; None is a single rank, without torch.distributed."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def group_size(group: ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def all_gather_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """Stack every rank's `x` along its first dimension; the shape is the same on all ranks."""
    gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    _collective("all_gather_single", "all_gather_into_tensor")(gathered, x.contiguous(), group=group)
    return gathered


def _collective(name: str, before: str) -> Any:
    """Return a collective by its name, or by its name before torch 2.13."""
    return getattr(dist, name, None) or getattr(dist, before)


@dataclass(frozen=True)
class VocabShard:
    """A tensor-parallel rank's rows of the vocabulary, from the id `start` on.

    All ranks have equally many rows, of which the first `valid` are among the `vocab_size` real ones. Padded rows must
    stay out of the softmax: their logits, often zero, would take probability mass from the real ones.
    """

    start: int
    valid: int
    vocab_size: int

    @classmethod
    def of(cls, size: int, vocab_size: int | None, group: ProcessGroup | None) -> "VocabShard":
        """Return this rank's shard; raises ValueError if all ranks together hold fewer than `vocab_size` rows."""
        padded = size * group_size(group)
        real = padded if vocab_size is None else vocab_size
        if not 0 < real <= padded:
            raise ValueError(f"vocab_size is {real}, but the ranks together hold {padded} vocabulary rows")
        start = size * group_rank(group)
        return cls(start=start, valid=min(max(real - start, 0), size), vocab_size=real)

    def check_targets(self, target_N: Tensor, name: str = "target") -> None:
        """Raise ValueError for an id outside the vocabulary, whose result would be silently wrong."""
        outside_N = (target_N < 0) | (target_N >= self.vocab_size)
        if bool(outside_N.any()):
            first = int(target_N[outside_N][0])
            raise ValueError(
                f"{name} {first} is outside the vocabulary of {self.vocab_size}: mask the tokens without one"
            )


@dataclass(frozen=True)
class TokenRows:
    """The token rows in a computation; `kept_N` is None for all of them."""

    total: int
    kept_N: Tensor | None
    group: ProcessGroup | None
    sequence_parallel: bool

    @classmethod
    def of(
        cls,
        mask: Tensor | None,
        total: int,
        group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
    ) -> "TokenRows":
        """Select the rows where the mask is not zero."""
        kept_N = None if mask is None else (mask.reshape(-1) != 0).nonzero().squeeze(1)
        return cls(total, kept_N, group, sequence_parallel and group_size(group) > 1)

    @property
    def count(self) -> int:
        return self.total if self.kept_N is None else self.kept_N.numel()

    def select(self, x_T: Tensor) -> Tensor:
        """Return the kept rows of flattened values, with any trailing dimensions."""
        return x_T if self.kept_N is None else x_T.index_select(0, self.kept_N)

    def spread(self, x_N: Tensor) -> Tensor:
        """Put kept rows back into their places among all tokens, with exact zeros elsewhere."""
        if self.kept_N is None:
            return x_N
        return x_N.new_zeros(self.total, *x_N.shape[1:]).index_copy_(0, self.kept_N, x_N)

    def gather_hidden(self, hidden_LH: Tensor) -> Tensor:
        """Return the whole sequence's kept rows; sequence-parallel input is gathered from all shards."""
        if self.group is None or not self.sequence_parallel:
            return self.select(hidden_LH)
        count, mine_M, slot_N = self._exchange(hidden_LH.device)
        sent = hidden_LH.new_zeros(count, hidden_LH.shape[1])
        sent[: mine_M.numel()] = hidden_LH.index_select(0, mine_M)
        received = all_gather_rows(sent, self.group) if count > 0 else sent
        return received.index_select(0, slot_N)

    def reduce_hidden_grad(self, grad_NH: Tensor) -> Tensor:
        """Sum the gradients over ranks, each of which covers its own vocabulary; reverses `gather_hidden`."""
        if self.group is None or not self.sequence_parallel:
            if self.group is not None and self.group.size() > 1 and grad_NH.shape[0] > 0:
                grad_NH = grad_NH.contiguous()
                dist.all_reduce(grad_NH, group=self.group)  # pyright: ignore[reportUnknownMemberType]
            return self.spread(grad_NH)
        (count, mine_M, slot_N), ranks = self._exchange(grad_NH.device), self.group.size()
        received = grad_NH.new_empty(count, grad_NH.shape[1])
        if count > 0:
            sent = grad_NH.new_zeros(ranks * count, grad_NH.shape[1]).index_copy_(0, slot_N, grad_NH)
            _collective("reduce_scatter_single", "reduce_scatter_tensor")(received, sent, group=self.group)
        local = grad_NH.new_zeros(self.total // ranks, grad_NH.shape[1])
        return local.index_copy_(0, mine_M, received[: mine_M.numel()])

    def _exchange(self, device: torch.device) -> tuple[int, Tensor, Tensor]:
        """Return the rows that each rank sends, this rank's kept ones `mine_M`, and the slot where kept row i arrives.

        A rank's kept rows come first among the rows that it sends.
        """
        ranks, rank = group_size(self.group), group_rank(self.group)
        length = max(self.total // ranks, 1)
        kept_N = torch.arange(self.total, device=device) if self.kept_N is None else self.kept_N
        shard_N = kept_N // length
        count_R = torch.bincount(shard_N, minlength=ranks)
        start_R = count_R.cumsum(0) - count_R
        sent = int(count_R.max())
        slot_N = shard_N * sent + torch.arange(kept_N.numel(), device=device) - start_R[shard_N]
        return sent, kept_N[shard_N == rank] - rank * length, slot_N
