"""What a recipe writes over in config.json, and the positions that NeMo RL goes beyond without a word."""

from typing import cast

from nemo_rl_mcore.config.base import Tree
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.models.overrides import OVERRIDES
from nemo_rl_mcore.recipe.validate import with_pretrained_model
from nemo_rl_mcore.tools.migrate.draft import Draft

_TOTAL = "policy.max_total_sequence_length"


def read_overrides(draft: Draft) -> None:
    """Drop sections that write nothing over; a critic is the policy's model, and has its overrides."""
    of_policy = draft.section(f"policy.{OVERRIDES}")
    given = draft.section(f"value.{OVERRIDES}")
    if draft.section("value") and given != of_policy:
        draft.refuse(f"value.{OVERRIDES}", given, "give policy and value the same", "is not the policy's")
        draft.pop(f"value.{OVERRIDES}")
    for name in ("policy", "value", "teacher"):
        path = f"{name}.{OVERRIDES}"
        if draft.has(path) and (name == "value" or not draft.section(path)):
            draft.pop(path)
            draft.dropped.append(path)


def extend_positions(draft: Draft) -> None:
    """Say that sequences are longer than the weights have positions for; rotations go on beyond them."""
    total = draft.number(_TOTAL)
    filled, _ = with_pretrained_model(draft.tree)
    for name in ("policy", "teacher"):
        longest = _longest(filled.get(name))
        if total is not None and longest is not None and total > longest:
            why = f"NeMo RL trains {total} tokens of a model that has been trained on {longest}"
            draft.change(f"{name}.{OVERRIDES}.max_position_embeddings", total, why)


def _longest(section: object) -> int | None:
    model = cast("Tree", section).get("model") if isinstance(section, dict) else None
    try:
        return ModelConfig.model_validate(model).longest_sequence
    except ValueError:  # which is told when the recipe is checked
        return None


STEPS = (read_overrides, extend_positions)
