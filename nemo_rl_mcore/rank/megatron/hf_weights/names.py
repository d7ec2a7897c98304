"""The weight behind a parameter of Megatron."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nemo_rl_mcore.config import ModelConfig
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.models import layer_slots, outside_of_layers
from nemo_rl_mcore.models.weights import Slot, Weight

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# megatron-core 0.20 names the layer inside otherwise.
_PREDICTION = re.compile(r"mtp\.layers\.(\d+)\.(?:transformer_layer\.|mtp_model_layer\.)?(.+)")


def find_weight(name: str, layers: Sequence[int], first_expert: int, model: ModelConfig) -> Weight:
    """Return the weight behind a parameter of one rank's stage.

    layers: the numbers, over the whole model, of the stage's layers. first_expert: that of this rank's first expert.
    Raises ValueError for a parameter that the table does not know.
    """
    outside = outside_of_layers(model)
    slots: Sequence[Slot] = outside
    layer, own_name = None, name
    if inside := _LAYER.fullmatch(name):
        layer, own_name = layers[int(inside[1])], inside[2]
    elif inside := _PREDICTION.fullmatch(name):
        layer, own_name = model.num_layers + int(inside[1]), inside[2]
    if layer is not None:
        slots = layer_slots(model, layer)
    for slot in slots:
        if (match := re.fullmatch(slot.megatron, own_name)) is None:
            continue
        if slot is outside.output and model.tie_word_embeddings:
            slot = outside.embedding  # the last pipeline stage's copy
        numbers = [int(number) for number in match.groups() if number is not None]
        return Weight(slot, layer, first_expert + numbers[0] if numbers else None)
    raise RefusedError(
        f"no Hugging Face tensor is known for Megatron's parameter {name!r}", code="unknown-parameter"
    )
