"""The families of models: what each is, how its config.json is read and written, and what its weights are called."""

from collections.abc import Iterator

from nemo_rl_mcore.config.families import llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from nemo_rl_mcore.config.families.family import Family, features_of
from nemo_rl_mcore.config.families.weights import (
    EMBEDDING,
    FINAL_NORM,
    LAYER,
    OUTPUT,
    PREDICTION,
    Slot,
    Weight,
)
from nemo_rl_mcore.config.model import ModelConfig

FAMILIES = {
    family.model_type: family
    for family in (
        llama.FAMILY,
        mistral.FAMILY,
        mixtral.FAMILY,
        qwen2.FAMILY,
        qwen3.FAMILY,
        qwen3_moe.FAMILY,
    )
}


def family_of(model: ModelConfig) -> Family:
    """Return the family that an architecture is saved as; ValueError says what no family has."""
    if reason := missing_family(model):
        raise ValueError(reason)
    return next(family for family in FAMILIES.values() if family.has(model))


def missing_family(model: ModelConfig) -> str:
    """Return why no family has this architecture; empty where one has it."""
    if any(family.has(model) for family in FAMILIES.values()):
        return ""
    features = features_of(model)
    if model.num_moe_experts is not None and model.moe_router_pre_softmax:
        features["moe_router_pre_softmax"] = True  # of some families it is a setting
    described = " with ".join(f"policy.model.{name}: {value}" for name, value in features.items())
    return f"no supported Hugging Face family has {described} (known: {', '.join(FAMILIES)})"


def layer_slots(model: ModelConfig) -> list[Slot]:
    """Return the weights of a layer, those of a model that no family has too."""
    layer = next((family.layer for family in FAMILIES.values() if family.has(model)), LAYER)
    return [slot for slot in layer if slot.exists(model)]


def prediction_slots(model: ModelConfig) -> list[Slot]:
    """Return the weights of a multi-token prediction layer that other layers do not have."""
    return [slot for slot in PREDICTION if slot.exists(model)]


def all_weights(model: ModelConfig) -> Iterator[Weight]:
    """Yield every weight of the whole model, in the order of its layers."""
    slots, predicting = layer_slots(model), prediction_slots(model)
    yield Weight(EMBEDDING)
    for layer in range(model.num_layers):
        yield from _in_layer(slots, layer, model)
    yield Weight(FINAL_NORM)
    if OUTPUT.exists(model):
        yield Weight(OUTPUT)
    for layer in range(model.num_layers, model.num_layers + (model.mtp_num_layers or 0)):
        yield from _in_layer([*predicting, *slots], layer, model)


def _in_layer(slots: list[Slot], layer: int, model: ModelConfig) -> Iterator[Weight]:
    for slot in slots:
        if slot.of_expert:
            yield from (Weight(slot, layer, expert) for expert in range(model.num_moe_experts or 0))
        else:
            yield Weight(slot, layer)


def count_parameters(model: ModelConfig) -> int:
    """Return how many numbers all weights have."""
    of_layer = sum(slot.count(model) for slot in layer_slots(model))
    of_prediction = of_layer + sum(slot.count(model) for slot in prediction_slots(model))
    outside = sum(slot.count(model) for slot in (EMBEDDING, FINAL_NORM, OUTPUT) if slot.exists(model))
    return model.num_layers * of_layer + (model.mtp_num_layers or 0) * of_prediction + outside
