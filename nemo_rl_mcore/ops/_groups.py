"""Process groups as the kernels use them; a missing group is a single rank, without torch.distributed."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def group_size(group: ProcessGroup | None) -> int:
    """Return the number of ranks in the group; a missing group is a single rank."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """Rank of this process within the group."""
    return 0 if group is None else group.rank()


def all_gather_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """Stack every rank's `x` along its first dimension; the shape is the same on all ranks."""
    gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    _collective("all_gather_single", "all_gather_into_tensor")(gathered, x.contiguous(), group=group)
    return gathered


def reduce_scatter_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum `x` over ranks and keep this rank's share of its first dimension."""
    mine = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    _collective("reduce_scatter_single", "reduce_scatter_tensor")(mine, x.contiguous(), group=group)
    return mine


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum `x` over ranks, in place where it is contiguous."""
    x = x.contiguous()
    dist.all_reduce(x, group=group)  # pyright: ignore[reportUnknownMemberType]
    return x


def _collective(name: str, before: str) -> Any:
    """Return a collective by its name, or by that which it had before torch 2.13."""
    return getattr(dist, name, None) or getattr(dist, before)


@dataclass(frozen=True)
class VocabShard:
    """The rows of the vocabulary that one tensor-parallel rank holds.

    The global vocabulary is padded so that every rank has the same number of rows, beginning at the id
    `start`; the first `valid` of them are among the `vocab_size` real ones. Padded rows must stay out of
    the softmax, or their logits, often zero, take probability mass from the real ones.
    """

    start: int
    valid: int
    vocab_size: int

    @classmethod
    def of(cls, size: int, vocab_size: int | None, group: ProcessGroup | None) -> "VocabShard":
        """Return this rank's shard; raise ValueError if all ranks together hold fewer than `vocab_size`."""
        padded = size * group_size(group)
        real = padded if vocab_size is None else vocab_size
        if not 0 < real <= padded:
            raise ValueError(f"vocab_size is {real}, but the ranks together hold {padded} vocabulary rows")
        start = size * group_rank(group)
        return cls(start=start, valid=min(max(real - start, 0), size), vocab_size=real)

    def check_targets(self, target_N: Tensor, name: str = "target") -> None:
        """Raise ValueError for an id outside the vocabulary: its result would be silently wrong."""
        outside_N = (target_N < 0) | (target_N >= self.vocab_size)
        if bool(outside_N.any()):
            first = int(target_N[outside_N][0])
            raise ValueError(
                f"{name} {first} is outside the vocabulary of {self.vocab_size}: mask the tokens without one"
            )
