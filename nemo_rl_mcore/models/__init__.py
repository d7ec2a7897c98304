"""The families of models: what each is, how its config.json is read and written, and what its weights are called."""

from collections.abc import Iterator

from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.models import deepseek_v3, gpt_oss, nemotron_h
from nemo_rl_mcore.models.decoders import DECODERS
from nemo_rl_mcore.models.family import Family, features_of
from nemo_rl_mcore.models.weights import LAYER, OUTSIDE, PREDICTION, Outside, Slot, Weight

FAMILIES = {
    family.model_type: family
    for family in sorted(
        (*DECODERS, deepseek_v3.FAMILY, gpt_oss.FAMILY, nemotron_h.FAMILY), key=lambda one: one.model_type
    )
}


def family_of(model: ModelConfig) -> Family:
    if (found := _known_family(model)) is None:
        raise ValueError(missing_family(model))
    return found


def _known_family(model: ModelConfig) -> Family | None:
    return next((family for family in FAMILIES.values() if family.has(model)), None)


def missing_family(model: ModelConfig) -> str:
    """Return why no family has this architecture; empty where one has it."""
    if _known_family(model) is not None:
        return ""
    features = features_of(model)
    if model.num_moe_experts is not None and model.moe_router_pre_softmax:
        features["moe_router_pre_softmax"] = True  # of some families it is a setting
    if model.hybrid_layer_pattern is not None:
        features = {"hybrid_layer_pattern": model.hybrid_layer_pattern} | features
    described = " with ".join(f"{name}: {value}" for name, value in features.items())
    return f"no supported Hugging Face family has {described} (known: {', '.join(FAMILIES)})"


def layer_slots(model: ModelConfig, layer: int) -> list[Slot]:
    """Return the weights of a layer, those of a model that no family has too.

    Layers of multi-token prediction are counted after the others.
    """
    family, default = (
        _known_family(model),
        deepseek_v3.LATENT_LAYER if model.multi_latent_attention else LAYER,
    )
    known = default if family is None else family.layer
    slots = known if layer < model.num_layers else (*PREDICTION, *known)
    return [slot for slot in slots if slot.exists(model) and slot.in_layer(model, layer)]


def outside_of_layers(model: ModelConfig) -> Outside:
    family = _known_family(model)
    return OUTSIDE if family is None else family.outside


def all_layers(model: ModelConfig) -> range:
    return range(model.num_layers + (model.mtp_num_layers or 0))


def all_weights(model: ModelConfig) -> Iterator[Weight]:
    """Yield every weight of the whole model, in the order of its layers."""
    outside = outside_of_layers(model)
    yield Weight(outside.embedding)
    for layer in all_layers(model):
        for slot in layer_slots(model, layer):
            experts = range(model.num_moe_experts or 0) if slot.of_expert else (None,)
            yield from (Weight(slot, layer, expert) for expert in experts)
        if layer == model.num_layers - 1:  # those of prediction stand behind
            yield from (Weight(slot) for slot in outside.of(model) if slot is not outside.embedding)


def count_parameters(model: ModelConfig) -> int:
    of_layers = sum(slot.count(model) for layer in all_layers(model) for slot in layer_slots(model, layer))
    return of_layers + sum(slot.count(model) for slot in outside_of_layers(model).of(model))
