"""What an optimizer keeps of each weight, named and shaped as the weight is: so it can be stored without its layout.

Megatron has a format for each kind of optimizer, and numbers the optimizers of dense and expert weights by their place.
Here the fp32 copy and the moments of a weight are called `optimizer.state.<kind>.<weight>` whatever keeps them, so that
parallel sizes and the distributed optimizer may change between save and load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params

from nemo_rl_mcore import accelerator
from nemo_rl_mcore.megatron.sharded_files import ShardedStateDict, layout_independent

_STEP = "step"
_MAIN = "param"
_PREFIX = "optimizer.state"


def sharded_optimizer_state(
    optimizer: MegatronOptimizer, model_state: ShardedStateDict, *, loading: bool
) -> ShardedStateDict:
    """{part: {weight: {kind: ShardedTensor}}} over the model's sharded state dict; every rank takes part."""
    state: ShardedStateDict = {}
    for number, part in enumerate(parts_of(optimizer)):
        _ensure_moments(part)
        if isinstance(part, DistributedOptimizer):
            weights = cast(
                dict[int, Any],
                part.sharded_param_state_fully_reshardable(model_state, loading, layout_independent()),
            )
            if not _keeps_main_copies(part):
                weights = {place: _without_main(kinds) for place, kinds in weights.items()}
        else:
            weights = dict(enumerate(_whole_weights(part, model_state)))
        state[str(number)] = weights
    return state


def load_optimizer_state(optimizer: MegatronOptimizer, state: ShardedStateDict, step: float) -> None:
    """Take over the state that was read through `sharded_optimizer_state`; the weights must be loaded already."""
    for number, part in enumerate(parts_of(optimizer)):
        weights = state.get(str(number), {})
        if isinstance(part, DistributedOptimizer):
            _load_distributed(part, weights)
        else:
            _load_whole(part, weights)
        _set_step(part, step)


def optimizer_step(optimizer: MegatronOptimizer) -> float:
    """Return how many updates the moments have seen, the same for every weight; every rank takes part.

    A rank whose weights are all frozen has seen none.
    """
    steps = [
        float(holder[_STEP])
        for part in parts_of(optimizer)
        for holder in (*part.optimizer.state.values(), *part.optimizer.param_groups)
        if _STEP in holder
    ]
    most = torch.tensor(max(steps, default=0.0), device=accelerator.device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers of dense and of expert weights; one without weights on this rank holds nothing."""
    chained = cast(list[Any], cast(ChainedOptimizer, optimizer).chained_optimizers)
    return [part for part in chained if part.optimizer is not None]


def _ensure_moments(part: Any) -> None:
    """Give a fresh optimizer its moments, all zero: only what exists can be saved or filled.

    A step at rate 0 makes them; it moves no weight, and is not counted.
    """
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
            # A tensor of its own for each weight: where DistributedOptimizer loads (optimizer/distrib_optimizer.py),
            # they share one, and each weight counts it up.
            state[_STEP] = torch.full_like(state[_STEP], step)
    for group in part.optimizer.param_groups:
        if _STEP in group:  # Transformer Engine's Adam counts here
            group[_STEP] = type(group[_STEP])(step)


def _keeps_main_copies(part: DistributedOptimizer) -> bool:
    """Return whether the weights are in 16 bits; else the optimizer works on the weights themselves."""
    return any(bool(group) for group in part.model_float16_groups)


def _without_main(kinds: dict[str, Any]) -> dict[str, Any]:
    return {kind: tensor for kind, tensor in kinds.items() if kind != _MAIN}


def _load_distributed(part: DistributedOptimizer, weights: dict[int, Any]) -> None:
    # load_parameter_state_from_fully_reshardable would look for the steps among what is loaded.
    steps = [(state, state.pop(_STEP)) for state in part.optimizer.state.values() if _STEP in state]
    if not _keeps_main_copies(part):
        for kinds, weight in zip(weights.values(), _weights_in_order(part), strict=True):
            kinds[_MAIN] = weight
    part.load_parameter_state_from_fully_reshardable(weights)
    for state, step in steps:
        state[_STEP] = step


def _weights_in_order(part: DistributedOptimizer) -> Iterator[torch.Tensor]:
    """Yield the model's weights as `sharded_param_state_fully_reshardable` numbers them."""
    for buffer in part.buffers:
        yield from (weight.detach() for weight in buffer.param_index_map)


def _whole_weights(part: Any, model_state: ShardedStateDict) -> Iterator[dict[str, Any]]:
    """For each weight of an optimizer that is not distributed: its fp32 copy, if it has one, and its moments."""
    entries = {
        id(entry.data): entry
        for entry in nested_values(model_state)
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }
    for weight, main in _main_parameters(part):
        kinds = {_MAIN: main} if main is not weight else {}
        moments = part.optimizer.state[main]
        kinds |= {kind: value for kind, value in moments.items() if kind != _STEP and value is not None}
        yield {
            kind: make_sharded_optimizer_tensor(entries[id(weight)], tensor, f"{_PREFIX}.{kind}")
            for kind, tensor in kinds.items()
        }


def _load_whole(part: Any, weights: dict[int, Any]) -> None:
    with torch.no_grad():
        for place, (_, main) in enumerate(_main_parameters(part)):
            for kind, value in weights.get(place, {}).items():
                (main if kind == _MAIN else part.optimizer.state[main][kind]).copy_(value)


def _main_parameters(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each weight with the tensor that the optimizer updates for it."""
    if not isinstance(part, Float16OptimizerWithFloat16Params):
        yield from ((weight, weight) for group in part.optimizer.param_groups for weight in group["params"])
        return
    for half, copies, full in zip(
        part.float16_groups, part.fp32_from_float16_groups, part.fp32_from_fp32_groups, strict=True
    ):
        yield from zip(half, copies, strict=True)
        yield from ((weight, weight) for weight in full)
