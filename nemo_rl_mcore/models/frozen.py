"""Weights that training leaves unchanged, by patterns of their Hugging Face names."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import translate

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.models import all_weights, layer_slots
from nemo_rl_mcore.models.weights import ROUTER_WEIGHT, Weight

KEY = "megatron_cfg.freeze"


def frozen_of(policy: PolicyConfig) -> frozenset[Weight]:
    """Return the frozen weights: with adapters, all; otherwise those that match a pattern, and frozen routers."""
    model, megatron = policy.model, policy.megatron_cfg
    if megatron.peft.enabled:
        return frozenset(all_weights(model))
    frozen = set[Weight]()
    if megatron.freeze:
        matches = re.compile("|".join(map(translate, megatron.freeze))).fullmatch
        frozen = {weight for weight in all_weights(model) if any(map(matches, weight.names))}
    if megatron.freeze_moe_router:
        frozen |= {weight for weight in all_weights(model) if weight.slot.megatron == ROUTER_WEIGHT}
    return frozenset(frozen)


def pattern_problems(model: ModelConfig, patterns: Sequence[str]) -> Iterator[Problem]:
    """Yield problems for patterns that match nothing, or only part of a parameter."""
    if not patterns:
        return
    frozen = set[Weight]()
    for number, pattern in enumerate(patterns):
        matches = re.compile(translate(pattern)).fullmatch
        matched = {weight for weight in all_weights(model) if any(map(matches, weight.names))}
        if not matched:
            prefix = layer_slots(model, 0)[0].prefix.format(layer=0)
            names = f"{next(all_weights(model)).names[0]} and {prefix}*"
            what = f"no weight matches {pattern!r}"
            remedy = f"use the names of Hugging Face models, such as {names}"
            yield Problem("not-found", f"{KEY}.{number}", what, remedy, ("model",))
        frozen |= matched
    matches = re.compile("|".join(map(translate, patterns))).fullmatch
    for weight in all_weights(model):
        if weight in frozen and (rest := [name for name in weight.names if not matches(name)]):
            whole, left = ", ".join(weight.names), ", ".join(rest)
            what = f"Megatron stores {whole} as one weight, but {left} would stay trainable"
            yield Problem("incompatible", KEY, what, "freeze all or none")
            break  # other layers give the same result
    of_layers = Counter((weight.slot, weight.layer) for weight in frozen if weight.expert is not None)
    for (_, layer), count in of_layers.items():
        if count < (model.num_moe_experts or 0):
            what = f"only {count} of layer {layer}'s {model.num_moe_experts} experts would be frozen"
            yield Problem("not-supported", KEY, what, "freeze all or none")
            break
