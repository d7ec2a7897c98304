"""Overlap the reduction of a step's gradients with its last schedule call, also when several calls accumulate them."""

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
    """Start the asynchronous reductions that the backward hooks have not started: all, if the hooks were held back."""
    for group in groups:
        if group.grad_reduce_handle is None:
            group.start_grad_sync()


def bucket_groups(chunks: list[DistributedDataParallel]) -> list[Any]:
    """Return Megatron's bucket groups, each reduced at once: dense weights, then experts, chunk by chunk."""
    return [
        group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]


@dataclass
class OverlappedGradSync:
    """The overlapped reduction of one rank's chunks; order: bucket groups as a backward pass completes them."""

    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    order: list[Any] = field(default_factory=list[Any])
    all_ranks_know: bool = False

    @contextmanager
    def begin(self, factor: float) -> Iterator[bool]:
        """Scale the gradients of one schedule call by `factor` and start their reduction; yields whether it does.

        All ranks enter it; if it yields False, gradients are as `deferred_grad_sync` leaves them. A rank whose schedule
        fails still starts its reductions, since other ranks may wait for them; clearing the gradients ends these.
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
        """Record the order in which the last microbatch completes the bucket groups, without reducing them."""
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
            counted = (
                len(group.per_param_grad_ready_counts) == len(group.params)
                for group in groups
                if group.is_first_batch
            )
            learned = last_come.keys() == group_of.keys() and all(counted)
        finally:
            for hook in hooks:
                hook.remove()
            if learned:
                self.order = [*dict.fromkeys(group_of[parameter] for parameter in reversed(last_come))][::-1]
            else:
                for group in groups:  # otherwise Megatron would keep these counts for every later pass
                    group.per_param_grad_ready_counts = {}

    @contextmanager
    def _last_microbatch_counts(self) -> Iterator[None]:
        """Let the schedules enable the backward hooks for the last microbatch."""
        held_back = self.config.no_sync_func
        self.config.no_sync_func = lambda: _HeldBack(bucket_groups(self.chunks))
        try:
            yield
        finally:
            self.config.no_sync_func = held_back


@dataclass
class _HeldBack(AbstractContextManager[None]):
    """`DistributedDataParallel.no_sync` as a class instead of a generator.

    The pipelined schedules enter and exit it by hand: after an error, a generator would run its end whenever the
    error's traceback is collected, possibly within a later step.
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
    """Multiply each bucket by the factor before its reduction starts, as `scale_gradients` would have done."""
    buckets = [bucket for group in bucket_groups(chunks) for bucket in group.buckets]
    own = [bucket.gradient_scaling_factor for bucket in buckets]
    for bucket in buckets:
        bucket.gradient_scaling_factor *= factor
    try:
        yield
    finally:
        for bucket, before in zip(buckets, own, strict=True):
            bucket.gradient_scaling_factor = before
