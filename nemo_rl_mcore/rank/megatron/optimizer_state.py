"""Megatron's optimizer with its schedules, and its state of each weight, stored independently of the layout.

Megatron has a format for each kind of optimizer, and numbers the optimizers of dense and expert weights. Here a
weight's fp32 copy and moments are always named `optimizer.state.<kind>.<weight>` and have the weight's shape, so that
parallel sizes and the distributed optimizer may change between save and load.

Megatron's own conversion to whole weights, `DistributedOptimizer.sharded_param_state_fully_reshardable`, is not used.
Up to 0.19.2 it cuts a buffer without the padding between buckets at offsets that include it, and finds a weight by its
number in a parameter group, which is wrong if 16-bit and fp32 weights share the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.agreement import together
from nemo_rl_mcore.rank.policy_backend import DTYPES


def build_optimizer(
    policy: PolicyConfig, chunks: list[DistributedDataParallel]
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Build the optimizer of this rank's chunks, and its schedule, which counts samples."""
    schedule, peak = policy.megatron_cfg.scheduler, policy.megatron_cfg.optimizer
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(**optimizer_settings(policy)),
        [*chunks],
        # None turns off the decay of norms and biases.
        config_overrides={} if peak.decay_norms_and_biases else None,
    )
    samples = policy.train_global_batch_size
    # OptimizerParamScheduler asserts warm-up < decay, and decay > 0, also for a constant schedule.
    decay_iters = schedule.lr_decay_iters or schedule.lr_warmup_iters + 1
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=peak.lr,
        min_lr=peak.min_lr,
        lr_warmup_steps=schedule.lr_warmup_iters * samples,
        lr_decay_steps=decay_iters * samples,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=peak.weight_decay,
        end_wd=peak.weight_decay,
        wd_incr_steps=decay_iters * samples,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def optimizer_settings(policy: PolicyConfig) -> dict[str, Any]:
    optimizer, megatron = policy.megatron_cfg.optimizer, policy.megatron_cfg
    same = (
        *("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps"),
        "use_distributed_optimizer",
    )
    return {name: getattr(optimizer, name) for name in same} | {
        "optimizer": "adam",
        "bf16": policy.precision == "bfloat16",
        "params_dtype": DTYPES[policy.precision],
        "overlap_param_gather": megatron.distributed_data_parallel_config.overlap_param_gather,
        "clip_grad": policy.max_grad_norm,
    }


def weights_of(chunks: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield each chunk's parameters, then its buffers, since training also changes the experts' bias."""
    for chunk in chunks:
        model = cast(torch.nn.Module, unwrap_model(chunk))
        yield from (*model.parameters(), *model.buffers())


def gather_parameters(chunks: Iterable[torch.nn.Module]) -> None:
    """Gather the weights that `overlap_param_gather` would gather in the next forward pass; collective."""
    for chunk in chunks:
        # A frozen model has no steps to gather after.
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


_STEP, _MAIN, _PREFIX = "step", "param", "optimizer.state"
_MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's state; no other optimizer is supported


def sharded_optimizer_state(
    optimizer: MegatronOptimizer, model_state: ShardedStateDict, *, loading: bool
) -> ShardedStateDict:
    """Return {part: {weight: {kind: ShardedTensor}}} for the model's sharded state dict; every rank takes part.

    loading: leave a distributed optimizer's tensors uninitialised, to be filled.
    """
    entries = {
        id(entry.data): entry
        for entry in nested_values(model_state)
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }
    state: ShardedStateDict = {}
    for number, part in enumerate(parts_of(optimizer)):
        _ensure_moments(part)
        of_part = state[str(number)] = {}
        for place, (weight, main) in enumerate(_weights(part)):
            kept: Any = {} if main is None else _state_of(part, weight, main)
            if isinstance(part, DistributedOptimizer):
                kinds = _MOMENTS if weight.dtype == torch.float32 else (_MAIN, *_MOMENTS)
                kept = {
                    kind: torch.empty(weight.shape, dtype=torch.float32, device="cpu")
                    if loading
                    else _gathered(part, weight, kept.get(kind))
                    for kind in kinds
                }
            of_part[place] = {
                kind: make_sharded_optimizer_tensor(entries[id(weight)], tensor, f"{_PREFIX}.{kind}")
                for kind, tensor in kept.items()
            }
    return state


def load_optimizer_state(
    optimizer: MegatronOptimizer, state: ShardedStateDict, step: float, folder: Path
) -> None:
    """Load a state of `sharded_optimizer_state` that was read from `folder`, after the weights are loaded.

    Raises RefusedError on all ranks, with nothing changed, if an fp32 copy does not match its weight.
    """
    read = [
        (part, weight, main, kinds)
        for number, part in enumerate(parts_of(optimizer))
        for (weight, main), kinds in zip(_weights(part), state.get(str(number), {}).values(), strict=True)
        if main is not None
    ]
    # Megatron's own format, see above, can have copies at wrong places.
    with together():
        for part, weight, _, kinds in read:
            own = partial(_own_part, part, weight)
            if _MAIN in kinds and not own(kinds[_MAIN]).to(weight).equal(own(weight)):
                raise RefusedError(
                    f"{folder} holds an fp32 copy that does not round to its weight: the optimizer's state is "
                    "misplaced, or belongs to other weights; start from the weights alone",
                    code="optimizer-of-other-weights",
                )
    with torch.no_grad():
        for part, weight, main, kinds in read:
            for kind, tensor in _state_of(part, weight, main).items():
                tensor.copy_(_own_part(part, weight, kinds[kind]))
    for part in parts_of(optimizer):
        _set_step(part, step)


def optimizer_step(optimizer: MegatronOptimizer) -> float:
    """Return the number of updates that the moments include; every rank takes part, even if its weights are frozen."""
    steps = [
        float(holder[_STEP])
        for part in parts_of(optimizer)
        for holder in (*part.optimizer.state.values(), *part.optimizer.param_groups)
        if _STEP in holder
    ]
    most = torch.tensor(max(steps, default=0.0), device=accelerator.device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def states_of_weights(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Yield each weight and its optimizer state: whole, or this rank's flat part, if it has one."""
    for part in parts_of(optimizer):
        yield from (
            (weight, _state_of(part, weight, main)) for weight, main in _weights(part) if main is not None
        )


def parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers of dense and expert weights that have weights on this rank."""
    chained = cast(list[Any], cast(ChainedOptimizer, optimizer).chained_optimizers)
    return [part for part in chained if part.optimizer is not None]


def _ensure_moments(part: Any) -> None:
    """Create a new optimizer's moments, all zero, by an uncounted step at rate 0."""
    inner = part.optimizer
    if inner.state:
        return
    rates = [(group["lr"], group["weight_decay"]) for group in inner.param_groups]
    for group in inner.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    inner.step()
    inner.zero_grad()
    for group, (lr, weight_decay) in zip(inner.param_groups, rates, strict=True):
        group["lr"], group["weight_decay"] = lr, weight_decay
    _set_step(part, 0.0)


def _set_step(part: Any, step: float) -> None:
    for state in part.optimizer.state.values():
        if _STEP in state:
            # A new tensor for each weight: after DistributedOptimizer's own load (optimizer/distrib_optimizer.py) they
            # share one, which each weight increments.
            state[_STEP] = torch.full_like(state[_STEP], step)
    for group in part.optimizer.param_groups:
        if _STEP in group:  # Transformer Engine's Adam counts here
            group[_STEP] = type(group[_STEP])(step)


def _weights(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield each weight and the tensor that this rank updates for it; if sharded, a flat part or None."""

    def paired(weights: list[list[Any]], mains: list[list[Any]]) -> dict[torch.Tensor, torch.Tensor]:
        return dict(zip(chain(*weights), chain(*mains), strict=True))

    if isinstance(part, DistributedOptimizer):
        shards = paired(part.model_float16_groups, part.shard_fp32_from_float16_groups)
        shards |= paired(part.model_fp32_groups, part.shard_fp32_groups)
        yield from (
            (weight, shards.get(weight)) for buffer in part.buffers for weight in buffer.param_index_map
        )
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        yield from paired(part.float16_groups, part.fp32_from_float16_groups).items()
        yield from paired(part.fp32_from_fp32_groups, part.fp32_from_fp32_groups).items()
    else:
        yield from ((weight, weight) for group in part.optimizer.param_groups for weight in group["params"])


def _state_of(part: Any, weight: torch.Tensor, main: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a weight's moments, and the fp32 copy of a 16-bit weight."""
    kept = {_MAIN: main} if main.dtype != weight.dtype else {}
    moments = part.optimizer.state[main].items()
    return kept | {kind: value for kind, value in moments if kind != _STEP and value is not None}


def _gathered(part: DistributedOptimizer, weight: torch.Tensor, shard: torch.Tensor | None) -> torch.Tensor:
    """Return the whole tensor on the first rank's CPU, where it is written, and on "meta" on the others."""
    whole = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    if shard is not None:
        _own_part(part, weight, whole).copy_(shard.detach())
    group = part.data_parallel_group
    # One rank has an element, the others zeros, so the sum of the bits as integers is exact.
    dist.reduce(whole.view(torch.int32), dist.get_global_rank(group, 0), group=group)
    return whole.to("cpu" if group.rank() == 0 else "meta")


def _own_part(part: Any, weight: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, as the optimizer shards it, of a tensor of the weight's shape."""
    if not isinstance(part, DistributedOptimizer):
        return whole
    own = cast(Any, part)._get_model_param_range_map(weight)["param"]
    return whole.view(-1)[own.start : own.end]
