"""Which tokens carry loss, and how their hidden states travel between sequence-parallel ranks.

Shapes: T all tokens (sequence x batch, flattened), L = T / ranks of them on this rank, N those kept by the
mask, H hidden. A sequence shard is a contiguous block of L token rows. The mask covers all T tokens on
every rank, so each rank knows the others' counts without asking, and only kept rows are sent, padded to the
fullest shard.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_rl_mcore.ops._groups import (
    all_gather_rows,
    group_rank,
    group_size,
    reduce_scatter_rows,
    sum_over_ranks,
)


@dataclass(frozen=True)
class _Exchange:
    """Each rank sends `sent` rows, its kept ones `mine_M` first; kept row i arrives at `slot_N[i]`."""

    sent: int
    mine_M: Tensor
    slot_N: Tensor


@dataclass(frozen=True)
class TokenRows:
    """The token rows that enter a computation; `kept_N` is None when that is all of them."""

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
        """Return the number of kept rows."""
        return self.total if self.kept_N is None else self.kept_N.numel()

    def select(self, x_T: Tensor) -> Tensor:
        """Flattened values of the kept rows; trailing dimensions are kept as they are."""
        return x_T if self.kept_N is None else x_T.index_select(0, self.kept_N)

    def spread(self, x_N: Tensor) -> Tensor:
        """Put kept rows back in their places among all tokens, with exact zeros elsewhere."""
        if self.kept_N is None:
            return x_N
        return x_N.new_zeros(self.total, *x_N.shape[1:]).index_copy_(0, self.kept_N, x_N)

    def gather_hidden(self, hidden_LH: Tensor) -> Tensor:
        """Return the kept rows of the whole sequence, fetched from every shard when the input is sequence-parallel."""
        if self.group is None or not self.sequence_parallel:
            return self.select(hidden_LH)
        plan = self._exchange(hidden_LH.device)
        sent = hidden_LH.new_zeros(plan.sent, hidden_LH.shape[1])
        sent[: plan.mine_M.numel()] = hidden_LH.index_select(0, plan.mine_M)
        received = all_gather_rows(sent, self.group) if plan.sent > 0 else sent
        return received.index_select(0, plan.slot_N)

    def reduce_hidden_grad(self, grad_NH: Tensor) -> Tensor:
        """Sum the gradients over ranks, each of which saw only its own vocabulary, and spread them.

        This reverses `gather_hidden`: a reduce-scatter if sequence-parallel, an all-reduce if replicated.
        """
        if self.group is None or not self.sequence_parallel:
            if self.group is not None and self.group.size() > 1 and self.count > 0:
                grad_NH = sum_over_ranks(grad_NH, self.group)
            return self.spread(grad_NH)
        plan, ranks = self._exchange(grad_NH.device), self.group.size()
        sent = grad_NH.new_zeros(ranks * plan.sent, grad_NH.shape[1]).index_copy_(0, plan.slot_N, grad_NH)
        received = reduce_scatter_rows(sent, self.group) if plan.sent > 0 else sent
        local = grad_NH.new_zeros(self.total // ranks, grad_NH.shape[1])
        return local.index_copy_(0, plan.mine_M, received[: plan.mine_M.numel()])

    def _exchange(self, device: torch.device) -> _Exchange:
        ranks, rank = group_size(self.group), group_rank(self.group)
        length = max(self.total // ranks, 1)
        kept_N = torch.arange(self.total, device=device) if self.kept_N is None else self.kept_N
        shard_N = kept_N // length
        count_R = torch.bincount(shard_N, minlength=ranks)
        start_R = count_R.cumsum(0) - count_R
        sent = int(count_R.max())
        slot_N = shard_N * sent + torch.arange(kept_N.numel(), device=device) - start_R[shard_N]
        return _Exchange(sent, kept_N[shard_N == rank] - rank * length, slot_N)
