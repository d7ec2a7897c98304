"""Which tokens carry loss, and how their hidden states travel between sequence-parallel ranks.

Shapes: T all tokens (sequence x batch, flattened), L = T / ranks of them on this rank, N those kept by the
mask, H hidden. A sequence shard is a contiguous block of L token rows. The mask covers all T tokens on
every rank, so each rank knows the others' counts without asking, and only kept rows are sent, padded to the
fullest shard.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_rl_mcore.ops._groups import group_rank, group_size


@dataclass(frozen=True)
class _Exchange:
    """Layout of a gather of kept rows: every rank sends `sent` rows, of which `mine_M` are its own kept ones."""

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
        """Number of kept rows."""
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
        """Kept rows of the whole sequence, fetched from every shard when the input is sequence-parallel."""
        if not self.sequence_parallel:
            return self.select(hidden_LH)
        plan = self._exchange(hidden_LH.device)
        ranks, hidden_size = group_size(self.group), hidden_LH.shape[1]
        sent = hidden_LH.new_zeros(plan.sent, hidden_size)
        sent[: plan.mine_M.numel()] = hidden_LH.index_select(0, plan.mine_M)
        received = hidden_LH.new_empty(ranks * plan.sent, hidden_size)
        if plan.sent > 0:
            dist.all_gather_into_tensor(received, sent, group=self.group)
        return received.index_select(0, plan.slot_N)

    def reduce_hidden_grad(self, grad_NH: Tensor) -> Tensor:
        """Sum over ranks the gradients of the kept rows (each rank saw only its own vocabulary) and spread them.

        Reverses `gather_hidden`: a reduce-scatter when the input is sequence-parallel, an all-reduce when
        replicated.
        """
        if not self.sequence_parallel:
            grad_NH = grad_NH.contiguous()
            if group_size(self.group) > 1 and self.count > 0:
                dist.all_reduce(grad_NH, group=self.group)
            return self.spread(grad_NH)
        plan = self._exchange(grad_NH.device)
        ranks, hidden_size = group_size(self.group), grad_NH.shape[1]
        sent = grad_NH.new_zeros(ranks * plan.sent, hidden_size).index_copy_(0, plan.slot_N, grad_NH)
        received = grad_NH.new_empty(plan.sent, hidden_size)
        if plan.sent > 0:
            dist.reduce_scatter_tensor(received, sent, group=self.group)
        local = grad_NH.new_zeros(self.total // ranks, hidden_size)
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
