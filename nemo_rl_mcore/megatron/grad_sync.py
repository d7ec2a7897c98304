"""Hold Megatron's gradient synchronisation back while several schedule calls add up one step's gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

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
    """Reduce the step's gradients, once.

    This is more than the data-parallel reduction: layer-norm gradients under sequence parallelism, tied embeddings
    across pipeline stages and router biases are Megatron's to sum here. The gradients are already divided by the
    number of tokens or sequences, so no token count is handed over.
    """
    try:
        for chunk in chunks:
            if chunk.ddp_config.overlap_grad_reduce:
                # The overlapped reduction is normally started by the backward hooks, which were held back.
                chunk.start_grad_sync()
        finalize_model_grads([*chunks], num_tokens=None)
    except BaseException:
        _end_reductions(chunks)
        raise


def _end_reductions(chunks: list[DistributedDataParallel]) -> None:
    """Wait for the reductions in flight: one that is left open makes the next step skip its own."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if group.grad_reduce_handle is not None:
                group.finish_grad_sync()
