"""Reduce a step's gradients while its last schedule call computes them, though several calls add them up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_mcore.rank.megatron import parallel_groups


def start_reductions(groups: list[Any]) -> None:
    """Start the asynchronous reductions that the backward hooks have not: all of them where these were held back."""
    for group in groups:
        if group.grad_reduce_handle is None:
            group.start_grad_sync()


def bucket_groups(chunks: list[DistributedDataParallel]) -> list[Any]:
    """Return what Megatron reduces at once: groups of buckets of dense weights, then of experts', chunk by chunk."""
    return [
        group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]


@dataclass
class OverlappedGradSync:
    """For the chunks of one rank. Inside `begin`, `deferred_grad_sync` is in force around it.

    order: the bucket groups as they become complete in a backward pass; the same on ranks that hold the same weights.
    """

    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    order: list[Any] = field(default_factory=list[Any])
    all_ranks_know: bool = False

    @contextmanager
    def begin(self, factor: float) -> Iterator[bool]:
        """Around one schedule call, on all ranks: whether its gradients are multiplied by `factor` and being reduced.

        Else they are as `deferred_grad_sync` leaves them. A rank whose schedule fails reduces what it has, since the
        others may wait for it: whoever clears the gradients then ends that.
        """
        first_pass = any(group.is_first_batch for group in bucket_groups(self.chunks))
        if not self.all_ranks_know:
            known = torch.tensor(int(bool(self.order) and not first_pass))
            dist.all_reduce(known, op=dist.ReduceOp.MIN, group=parallel_groups.computing_ranks())
            self.all_ranks_know = bool(known)
        if not self.all_ranks_know:
            with self._learning(first_pass=first_pass):
                yield False
            return
        with _multiplied_by(factor, self.chunks), self._last_microbatch_counts():
            try:
                yield True
            finally:
                start_reductions(self.order)

    @contextmanager
    def _learning(self, *, first_pass: bool) -> Iterator[None]:
        """Inside, Megatron counts the last microbatch's gradients, and their order is noted; nothing is reduced."""
        groups = bucket_groups(self.chunks)
        group_of = {parameter: group for group in groups for parameter in group.params}
        last_come: dict[torch.nn.Parameter, None] = {}

        def note(parameter: torch.nn.Parameter) -> None:
            last_come.pop(parameter, None)
            last_come[parameter] = None

        hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in group_of]
        learned = False
        try:
            with self._last_microbatch_counts() if first_pass else nullcontext():
                yield
            learned = last_come.keys() == group_of.keys() and all(
                len(group.per_param_grad_ready_counts) == len(group.params)
                for group in groups
                if group.is_first_batch
            )
        finally:
            for hook in hooks:
                hook.remove()
            if learned:
                self.order = [*dict.fromkeys(group_of[parameter] for parameter in reversed(last_come))][::-1]
            else:
                for group in groups:  # Megatron would take them for those of every later pass
                    group.per_param_grad_ready_counts = {}

    @contextmanager
    def _last_microbatch_counts(self) -> Iterator[None]:
        """Inside, the schedules let the hooks of the last microbatch act."""
        held_back = self.config.no_sync_func
        self.config.no_sync_func = lambda: _HeldBack(bucket_groups(self.chunks))
        try:
            yield
        finally:
            self.config.no_sync_func = held_back


@dataclass
class _HeldBack(AbstractContextManager[None]):
    """What `DistributedDataParallel.no_sync` does, but not when it is collected.

    The pipelined schedules enter and leave it by hand: after an error, one that is a generator would end whenever the
    error's traceback goes, in the midst of a later step.
    """

    groups: list[Any]

    def __enter__(self) -> None:
        for group in self.groups:
            group.is_last_microbatch = False

    def __exit__(self, *_error: object) -> None:
        for group in self.groups:
            group.is_last_microbatch = True


@contextmanager
def _multiplied_by(factor: float, chunks: list[DistributedDataParallel]) -> Iterator[None]:
    """Inside, what a bucket starts to reduce is multiplied first, as `scale_gradients` would have done."""
    buckets = [bucket for group in bucket_groups(chunks) for bucket in group.buckets]
    own = [bucket.gradient_scaling_factor for bucket in buckets]
    for bucket in buckets:
        bucket.gradient_scaling_factor *= factor
    try:
        yield
    finally:
        for bucket, before in zip(buckets, own, strict=True):
            bucket.gradient_scaling_factor = before
