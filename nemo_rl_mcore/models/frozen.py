"""Frozen weights, which training leaves as they are, by patterns of their Hugging Face names."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import translate

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.models import all_layers, all_weights, layer_slots
from nemo_rl_mcore.models.weights import ROUTER_WEIGHT, Weight

KEY = "megatron_cfg.freeze"


def frozen_of(policy: PolicyConfig) -> frozenset[Weight]:
    """Return the weights that stay: all beside adapters, else those of a pattern, and routers where these are to."""
    model, megatron = policy.model, policy.megatron_cfg
    if megatron.peft.enabled:
        return frozenset(all_weights(model))
    frozen = {weight for pattern in megatron.freeze for weight in _matched(model, pattern)}
    if megatron.freeze_moe_router:
        frozen |= {
            Weight(slot, layer)
            for layer in all_layers(model)
            for slot in layer_slots(model, layer)
            if slot.megatron == ROUTER_WEIGHT
        }
    return frozenset(frozen)


def _matched(model: ModelConfig, pattern: str) -> list[Weight]:
    matches = re.compile(translate(pattern)).fullmatch
    return [weight for weight in all_weights(model) if any(map(matches, weight.names))]


def pattern_problems(model: ModelConfig, patterns: Sequence[str]) -> Iterator[Problem]:
    """Yield patterns that match nothing, or a part only of what training holds as one."""
    if not patterns:
        return
    frozen = set[Weight]()
    for number, pattern in enumerate(patterns):
        if not (matched := _matched(model, pattern)):
            prefix = layer_slots(model, 0)[0].prefix.format(layer=0)
            names = f"{next(all_weights(model)).names[0]} and {prefix}*"
            what = f"no weight of the model is called {pattern!r}"
            remedy = f"names are those of Hugging Face models, such as {names}"
            yield Problem("not-found", f"{KEY}.{number}", what, remedy, ("model",))
        frozen |= {*matched}
    matches = re.compile("|".join(map(translate, patterns))).fullmatch
    for weight in all_weights(model):
        if weight in frozen and (rest := [name for name in weight.names if not matches(name)]):
            what = (
                f"{', '.join(weight.names)} are one weight in Megatron, and {', '.join(rest)} is not frozen"
            )
            yield Problem("incompatible", KEY, what, "freeze all of them, or none")
            break  # the other layers say the same
    experts = model.num_moe_experts or 0
    of_layers = Counter((weight.slot, weight.layer) for weight in frozen if weight.expert is not None)
    for (_, layer), count in of_layers.items():
        if count < experts:
            what = f"{count} of {experts} experts of layer {layer} are frozen"
            yield Problem("not-supported", KEY, what, "freeze all experts of a layer, or none")
            break
