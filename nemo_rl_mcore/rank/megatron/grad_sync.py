"""Hold Megatron's gradient synchronisation back while several schedule calls add up one step's gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.transformer.transformer_config import TransformerConfig


@contextmanager
def deferred_grad_sync(config: TransformerConfig, chunks: list[DistributedDataParallel]) -> Iterator[None]:
    """Inside, backward passes only add to the local gradient buckets: nothing is reduced, nothing finalised.

    The schedules (pipeline_parallel/schedules.py) would otherwise reduce through `grad_sync_func`, leave `no_sync` for
    each call's last microbatch, and finalise at each call's end. All three functions come back on leaving, also after
    an exception. Enter it after the buckets were zeroed, since zeroing resets the flag that `no_sync` clears.
    """
    saved = config.grad_sync_func, config.no_sync_func, config.finalize_model_grads_func
    config.grad_sync_func, config.no_sync_func, config.finalize_model_grads_func = None, nullcontext, None
    try:
        with ExitStack() as stack:
            for chunk in chunks:
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        config.grad_sync_func, config.no_sync_func, config.finalize_model_grads_func = saved


def finalize_gradients(chunks: list[DistributedDataParallel]) -> None:
    """Reduce the step's gradients, once, or end the reductions that were started.

    This is more than the data-parallel reduction: layer-norm gradients under sequence parallelism, tied embeddings
    across pipeline stages and router biases are Megatron's to sum here. The gradients are already divided by the
    number of tokens or sequences, so no token count is handed over.
    """
    start_reductions([group for group in bucket_groups(chunks) if group.ddp_config.overlap_grad_reduce])
    finalize_model_grads([*chunks], num_tokens=None)


def start_reductions(groups: list[Any]) -> None:
    """Start the asynchronous reductions that the backward hooks have not: all of them where these were held back."""
    for group in groups:
        if group.grad_reduce_handle is None:
            group.start_grad_sync()


def drop_reductions(chunks: list[DistributedDataParallel]) -> None:
    """Wait for the reductions in flight, whose gradients nobody wants.

    One that is left would write into cleared gradients, and make the next step skip its own.
    """
    for group in bucket_groups(chunks):
        handle, group.grad_reduce_handle = group.grad_reduce_handle, None
        if handle is not None:
            with suppress(RuntimeError):  # of a peer that is gone; the next meeting tells
                handle.wait()


def bucket_groups(chunks: list[DistributedDataParallel]) -> list[Any]:
    """Return what Megatron reduces at once: groups of buckets of dense weights, then of experts', chunk by chunk."""
    return [
        group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]
