"""Model families: their features, config.json formats and weight names."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import as_yaml
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.models import deepseek_v3, gpt_oss, nemotron_h, qwen3_5
from nemo_rl_mcore.models.decoders import DECODERS
from nemo_rl_mcore.models.family import Family, features_of
from nemo_rl_mcore.models.weights import LAYER, OUTSIDE, PREDICTION, Outside, Slot, Weight

_ALL = (*DECODERS, deepseek_v3.FAMILY, gpt_oss.FAMILY, nemotron_h.FAMILY, *qwen3_5.FAMILIES)
FAMILIES = {family.model_type: family for family in sorted(_ALL, key=lambda one: one.model_type)}


def family_of(model: ModelConfig) -> Family:
    if (found := _known_family(model)) is None:
        raise ValueError(missing_family(model))
    return found


def _known_family(model: ModelConfig) -> Family | None:
    return next((family for family in FAMILIES.values() if family.has(model)), None)


def missing_family(model: ModelConfig) -> str:
    """Return the reason why no family has this architecture; empty if one does."""
    if _known_family(model) is not None:
        return ""
    features = features_of(model)
    if model.num_moe_experts is not None and model.moe_router_pre_softmax:
        features["moe_router_pre_softmax"] = True  # some families have it as a setting
    if model.hybrid_layer_pattern is not None:
        features = {"hybrid_layer_pattern": model.hybrid_layer_pattern} | features
    described = " with ".join(f"{name}: {as_yaml(value)}" for name, value in features.items())
    return f"no supported Hugging Face family has {described} (supported: {', '.join(FAMILIES)})"


def layer_slots(model: ModelConfig, layer: int) -> list[Slot]:
    """Return a layer's weights, also for a model that belongs to no family.

    Multi-token prediction layers are numbered after all others.
    """
    known = deepseek_v3.LATENT_LAYER if model.kv_lora_rank is not None else LAYER
    known = qwen3_5.LAYER if model.linear_attention_freq is not None else known
    if (family := _known_family(model)) is not None:
        known = family.layer
    slots = known if layer < model.num_layers else (*PREDICTION, *known)
    return [slot for slot in slots if slot.exists(model) and slot.in_layer(model, layer)]


def outside_of_layers(model: ModelConfig) -> Outside:
    family = _known_family(model)
    return OUTSIDE if family is None else family.outside


def all_layers(model: ModelConfig) -> range:
    return range(model.num_layers + (model.mtp_num_layers or 0))


def all_weights(model: ModelConfig) -> Iterator[Weight]:
    """Yield every weight of the whole model in layer order."""
    outside = outside_of_layers(model)
    yield Weight(outside.embedding)
    for layer in all_layers(model):
        for slot in layer_slots(model, layer):
            experts = range(model.num_moe_experts or 0) if slot.of_expert else (None,)
            yield from (Weight(slot, layer, expert) for expert in experts)
        if layer == model.num_layers - 1:  # prediction layers come last
            yield from (Weight(slot) for slot in outside.of(model) if slot is not outside.embedding)


def count_parameters(model: ModelConfig) -> int:
    of_layers = sum(slot.count(model) for layer in all_layers(model) for slot in layer_slots(model, layer))
    return of_layers + sum(slot.count(model) for slot in outside_of_layers(model).of(model))
