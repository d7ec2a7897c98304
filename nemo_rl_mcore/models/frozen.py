"""Frozen weights, which training leaves as they are, by patterns of their Hugging Face names."""

import re
from collections.abc import Iterator, Sequence
from fnmatch import translate

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.models import all_layers, all_weights, layer_slots
from nemo_rl_mcore.models.weights import ROUTER_WEIGHT, Weight

KEY = "megatron_cfg.freeze"


def frozen_of(policy: PolicyConfig) -> frozenset[Weight]:
    """Return the weights of a policy that training leaves as they are."""
    megatron = policy.megatron_cfg
    return frozen_weights(policy.model, megatron.freeze, routers=megatron.freeze_moe_router)


def frozen_weights(model: ModelConfig, patterns: tuple[str, ...], *, routers: bool) -> frozenset[Weight]:
    """Return the weights that a pattern matches, and the routers of experts where these are to stay."""
    frozen = {weight for pattern in patterns for weight in _matched(model, pattern)}
    if routers:
        frozen |= {weight for weight in _of_layers(model) if weight.slot.megatron == ROUTER_WEIGHT}
    return frozenset(frozen)


def _of_layers(model: ModelConfig) -> Iterator[Weight]:
    """Yield the weights of layers without those of experts."""
    return (
        Weight(slot, layer)
        for layer in all_layers(model)
        for slot in layer_slots(model, layer)
        if not slot.of_expert
    )


def _matched(model: ModelConfig, pattern: str) -> list[Weight]:
    matches = re.compile(translate(pattern)).fullmatch
    return [weight for weight in all_weights(model) if any(map(matches, weight.names))]


def pattern_problems(model: ModelConfig, patterns: Sequence[str]) -> Iterator[Problem]:
    """Yield patterns that match nothing, or a part only of what training holds as one."""
    if not patterns:
        return
    for number, pattern in enumerate(patterns):
        matched = _matched(model, pattern)
        if not matched:
            prefix = layer_slots(model, 0)[0].prefix.format(layer=0)
            names = next(iter(all_weights(model))).names[0], f"{prefix}*"
            yield Problem(
                "not-found",
                f"{KEY}.{number}",
                f"no weight of the model is called {pattern!r}",
                f"names are those of Hugging Face models, such as {' and '.join(names)}",
                ("model",),
            )
    frozen = frozen_weights(model, tuple(patterns), routers=False)
    yield from _split_weights(model, patterns, frozen)
    yield from _split_experts(model, frozen)


def _split_weights(
    model: ModelConfig, patterns: Sequence[str], frozen: frozenset[Weight]
) -> Iterator[Problem]:
    matches = re.compile("|".join(map(translate, patterns))).fullmatch
    for weight in all_weights(model):
        if weight in frozen and (rest := [name for name in weight.names if not matches(name)]):
            yield Problem(
                "incompatible",
                KEY,
                f"{', '.join(weight.names)} are one weight in Megatron, and {', '.join(rest)} is not frozen",
                "freeze all of them, or none",
            )
            return  # the other layers say the same


def _split_experts(model: ModelConfig, frozen: frozenset[Weight]) -> Iterator[Problem]:
    experts = model.num_moe_experts or 0
    of_layers: dict[tuple[object, int | None], set[int]] = {}
    for weight in frozen:
        if weight.expert is not None:
            of_layers.setdefault((weight.slot, weight.layer), set()).add(weight.expert)
    for (_, layer), found in of_layers.items():
        if len(found) < experts:
            yield Problem(
                "not-supported",
                KEY,
                f"{len(found)} of {experts} experts of layer {layer} are frozen",
                "freeze all experts of a layer, or none",
            )
            return
