"""The process groups and random state of a parallel layout."""

from __future__ import annotations

import gc
import random
from datetime import timedelta
from typing import Any, Literal, cast

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
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_mcore.config import MegatronConfig
from nemo_rl_mcore.ops._groups import all_gather_rows
from nemo_rl_mcore.rank import accelerator, rendezvous

type Group = Literal[
    "all", "tensor", "pipeline", "context", "expert", "data", "data_context", "tensor_context"
]

_all_ranks: dist.ProcessGroup | None = None
_SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
)


def initialize(config: MegatronConfig, seed: int, timeout_s: float) -> None:
    """Join the process group of all ranks (`rendezvous.join`), and split it into the layout's groups.

    These groups time out after `timeout_s`, since ranks that only compute arrive at about the same time. Ranks that a
    file or an engine may delay meet in `rendezvous.patient_group`.
    Raises ValueError if the world size is not a multiple of the model-parallel size.
    """
    global _all_ranks
    rendezvous.join()
    model_parallel = (
        config.tensor_model_parallel_size * config.pipeline_model_parallel_size * config.context_parallel_size
    )
    if dist.get_world_size() % model_parallel:
        raise ValueError(
            f"the world size {dist.get_world_size()} is not a multiple of the model-parallel size {model_parallel}: "
            "change the cluster's size or policy.megatron_cfg.*_parallel_size"
        )
    dist.barrier(rendezvous.patient_group)  # ranks may start at very different times
    timeout = timedelta(seconds=timeout_s)
    parallel_state.initialize_model_parallel(
        **{size: getattr(config, size) for size in _SIZES},
        distributed_timeout_minutes=timeout / timedelta(minutes=1),  # pyright: ignore[reportArgumentType]
    )
    # The only group that initialize_model_parallel creates without the timeout.
    parallel_state.update_pg_timeout(timeout, parallel_state.get_expert_data_parallel_group_gloo())
    _all_ranks = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
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
    """Leave the layout; another one can follow in this process, once no model refers to a gloo group."""
    global _all_ranks
    # parallel_state.destroy_model_parallel destroys a few of its groups, and drops its references to the others.
    groups = parallel_state._global_process_group_list or ()
    parallel_state.destroy_model_parallel()
    for group in (*groups, _all_ranks):
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
    _all_ranks = None
    for kind in (RotaryEmbedding, YarnRotaryEmbedding):
        kind.forward.cache_clear()  # of the last models' rotary positions, each with a reference to a group
    gc.collect()  # a former worker holds its groups in cycles


def rng_tracker() -> CudaRNGStatesTracker:
    """Return Megatron's random generators; ranks share some of them, but not all."""
    return cast(CudaRNGStatesTracker, get_cuda_rng_tracker())


def group(kind: Group) -> dist.ProcessGroup:
    """Return one of this rank's groups, named after the kinds of parallelism that its ranks differ in.

    all: every rank, over gloo with the layout's timeout, to synchronize after a computation. expert: ranks with
    different experts of a layer. data: ranks with different rows. data_context: ranks with different tokens, over which
    gradients are summed. tensor_context: ranks that share a sequence.
    """
    match kind:
        case "all":
            found: Any = _all_ranks
            assert found is not None
        case "tensor":
            found = parallel_state.get_tensor_model_parallel_group()
        case "pipeline":
            found = parallel_state.get_pipeline_model_parallel_group()
        case "context":
            found = parallel_state.get_context_parallel_group()
        case "expert":
            found = parallel_state.get_expert_model_parallel_group()
        case "data" | "data_context":
            found = parallel_state.get_data_parallel_group(with_context_parallel=kind == "data_context")
        case "tensor_context":
            found = parallel_state.get_tensor_and_context_parallel_group()
    return cast(dist.ProcessGroup, found)


def largest_of_expert_ranks(number: int, config: TransformerConfig) -> int:
    """Return the maximum over the ranks whose forward passes exchange tokens with this one; collective."""
    if config.expert_model_parallel_size == 1:
        return number
    largest = torch.tensor([number], device=accelerator.device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group("data_context"))
    return int(largest)


def gather_over_data_parallel_ranks(numbers: torch.Tensor) -> torch.Tensor:
    """Gather [N] from each rank into [ranks, N], on the CPU; only one of the ranks that share rows is included."""
    return all_gather_rows(numbers[None].to(accelerator.device()), group("data")).cpu()


def broadcast_from_last_stage(value: Any) -> Any:
    """Return the last pipeline stage's value, small and picklable, on every stage."""
    ranks = group("pipeline")
    if ranks.size() == 1:
        return value
    box = [value]
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast_object_list(box, src=source, group=ranks)
    return box[0]


def broadcast_tensor_from_last_stage(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return the last pipeline stage's tensor on every stage; the others pass None and need no shape."""
    ranks = group("pipeline")
    if ranks.size() == 1:
        assert tensor is not None
        return tensor
    shape, dtype = broadcast_from_last_stage(None if tensor is None else (tensor.shape, tensor.dtype))
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype, device=accelerator.device())
    received = tensor.contiguous()
    dist.broadcast(received, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=ranks)
    return received
