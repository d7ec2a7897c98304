"""The process groups of a parallel layout, and the random state that goes with them."""

from __future__ import annotations

import gc
import random
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.tensor_parallel.random import (
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)

from nemo_rl_mcore.config import MegatronConfig
from nemo_rl_mcore.ops._groups import all_gather_rows
from nemo_rl_mcore.rank import accelerator, rendezvous

_computing_ranks: dist.ProcessGroup | None = None


def initialize(config: MegatronConfig, seed: int, timeout_s: float) -> None:
    """Join the process group of all ranks, see `rendezvous.join`, and split it into the layout.

    The layout's groups wait for `timeout_s`: their ranks compute, and so arrive at about the same time.
    Ranks that may be late for another reason, a file or an engine, meet in `rendezvous.patient_group`.
    Raises ValueError if the world size is not a multiple of the model-parallel size.
    """
    global _computing_ranks
    rendezvous.join()
    model_parallel = (
        config.tensor_model_parallel_size * config.pipeline_model_parallel_size * config.context_parallel_size
    )
    if dist.get_world_size() % model_parallel:
        raise ValueError(
            f"the world size {dist.get_world_size()} is not a multiple of the model-parallel size {model_parallel}: "
            "change the cluster's size or policy.megatron_cfg.*_parallel_size"
        )
    dist.barrier(
        rendezvous.patient_group()
    )  # the ranks form the groups together, however late one of them is
    timeout = timedelta(seconds=timeout_s)
    sizes = (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *(
            "virtual_pipeline_model_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
        ),
    )
    parallel_state.initialize_model_parallel(
        **{size: getattr(config, size) for size in sizes},
        distributed_timeout_minutes=timeout / timedelta(minutes=1),  # pyright: ignore[reportArgumentType]
    )
    # The one group that parallel_state.initialize_model_parallel makes without it.
    parallel_state.update_pg_timeout(timeout, parallel_state.get_expert_data_parallel_group_gloo())
    _computing_ranks = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
    _seed_everything(seed, spread_experts=config.expert_model_parallel_size > 1)


def _seed_everything(seed: int, *, spread_experts: bool) -> None:
    # As in Megatron-LM, pipeline stages draw different weights, data-parallel ranks equal ones.
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    model_parallel_cuda_manual_seed(stage_seed)
    if spread_experts and not accelerator.has_cuda():
        # That call ends on the seed of this rank's experts, and without a GPU it cannot set the generator back:
        # ranks that must hold equal weights would draw different ones.
        torch.manual_seed(stage_seed)


def destroy() -> None:
    """Leave the layout; another one can follow in this process, once a model's references to gloo groups are gone."""
    global _computing_ranks
    # parallel_state.destroy_model_parallel forgets them, and destroys a few.
    groups = parallel_state._global_process_group_list or ()
    parallel_state.destroy_model_parallel()
    for group in (*groups, _computing_ranks):
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
    _computing_ranks = None
    for kind in (RotaryEmbedding, YarnRotaryEmbedding):
        kind.forward.cache_clear()  # which keeps the last models' rotary positions, with a group of each
    gc.collect()  # a former worker holds its groups in cycles


def rng_tracker() -> CudaRNGStatesTracker:
    """Return the generators that ranks of a layout share or do not."""
    return cast(CudaRNGStatesTracker, get_cuda_rng_tracker())


def computing_ranks() -> dist.ProcessGroup:
    """All ranks, over gloo, for `timeout_s`: where they meet at the end of what each has computed."""
    assert _computing_ranks is not None
    return _computing_ranks


def data_parallel_rank() -> int:
    return parallel_state.get_data_parallel_rank()


def data_parallel_size() -> int:
    return parallel_state.get_data_parallel_world_size()


def tensor_parallel_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def data_parallel_group() -> dist.ProcessGroup:
    """Return the ranks with different tokens, context parallelism included: weights' gradients are their sum."""
    return cast(dist.ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True))


def largest_of_data_parallel_ranks(number: int) -> int:
    """Return the largest of the numbers that the data-parallel ranks give; all must ask."""
    largest = torch.tensor([number], device=accelerator.device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=data_parallel_group())
    return int(largest)


def is_last_stage() -> bool:
    """Return whether this rank holds the output layer (of the last virtual stage, if there are several)."""
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def gather_over_data_parallel_ranks(numbers: torch.Tensor) -> torch.Tensor:
    """From [N] on each rank to [ranks, N], on the CPU; of ranks that share their sequences, one counts."""
    ranks = cast(dist.ProcessGroup, parallel_state.get_data_parallel_group())
    return all_gather_rows(numbers[None].to(accelerator.device()), ranks).cpu()


def broadcast_from_last_stage(value: Any) -> Any:
    """Give every pipeline stage the small picklable value that the last stage holds."""
    group = pipeline_group()
    if group.size() == 1:
        return value
    box = [value]
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast_object_list(box, src=source, group=group)
    return box[0]


def broadcast_tensor_from_last_stage(tensor: torch.Tensor | None) -> torch.Tensor:
    """Give every pipeline stage the tensor of the last stage; the others pass None and need not know its shape."""
    group = pipeline_group()
    if group.size() == 1:
        assert tensor is not None
        return tensor
    shape, dtype = broadcast_from_last_stage(None if tensor is None else (tensor.shape, tensor.dtype))
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype, device=accelerator.device())
    received = tensor.contiguous()
    dist.broadcast(received, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return received


def pipeline_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group())


def context_parallel_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())


def expert_parallel_group() -> dist.ProcessGroup:
    """Return the ranks that each hold other experts of a layer."""
    return cast(dist.ProcessGroup, parallel_state.get_expert_model_parallel_group())
