"""Low-rank adapters: selection of weights by Megatron's names of linear layers, and the adapters' own weights."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.models import all_weights
from nemo_rl_mcore.models.weights import COLUMNS, REPLICATED, Slot, Weight

KEY = "megatron_cfg.peft"
LORA_A, LORA_B = "lora_A", "lora_B"
_PEFT_PREFIX = "base_model.model."
_LINEAR = re.compile(r"(.+\.(?:linear_\w+|in_proj|out_proj|fc[12]_latent_proj))\.weight")
# If there are two names, the first belongs to Megatron's local layers.
_ALTERNATIVES = re.compile(r"\(\?:(.+?)\|.+\)")


@cache
def linear_name(weight: Weight) -> str | None:
    """Return Megatron's name for a weight's linear layer, with layers and experts numbered over the whole model."""
    name = _ALTERNATIVES.sub(r"\1", weight.slot.megatron).replace(r"(\d+)", "{expert}").replace("\\", "")
    if weight.layer is None or (linear := _LINEAR.fullmatch(name)) is None:
        return None
    return f"decoder.layers.{weight.layer}.{linear[1].format(expert=weight.expert)}"


def adapted_weights(policy: PolicyConfig) -> dict[Weight, str]:
    """Return the weights that have an adapter, with their linear layers' names; empty unless peft is enabled.

    Follows Megatron-Bridge's `ModuleMatcher`: a pattern is the last part of a name, or a whole name with wildcards; no
    pattern means every linear layer except grouped experts.
    """
    peft = policy.megatron_cfg.peft
    if not peft.enabled:
        return {}
    wanted, unwanted = _matcher(peft.target_modules), _matcher(peft.exclude_modules)
    names = ((weight, linear_name(weight)) for weight in all_weights(policy.model))
    return {
        weight: name
        for weight, name in names
        if name is not None and not unwanted(name)
        if (wanted(name) if peft.target_modules else weight.expert is None)
    }


def _matcher(patterns: Sequence[str]):
    whole = [".*".join(map(re.escape, pattern.split("*"))) for pattern in patterns]
    last_part = [rf"(?:.*\.)?{re.escape(pattern)}" for pattern in patterns]
    return re.compile("|".join(whole + last_part) or r"(?!)").fullmatch


@cache
def adapter_slots(slot: Slot, dim: int) -> tuple[Slot, Slot]:
    """Return a weight's adapter weights A and B; A is named after the first of the weight's tensors.

    A [dim, inputs] is split if ranks share the inputs, B [outputs, dim] if they share the outputs, in the weight's
    order.
    """
    modules = [name.removesuffix(".weight") for name in slot.hugging_face]
    rows, columns = zip(*(sizes.split() for sizes in slot.sizes), strict=True)
    cut, beside = slot.layout.dimension, replace(slot, prefix=_PEFT_PREFIX + slot.prefix)
    a, a_sizes = (f"{modules[0]}.{LORA_A}.weight",), (f"{dim} {columns[0]}",)
    b = tuple(f"{module}.{LORA_B}.weight" for module in modules)
    b_sizes = tuple(f"{size} {dim}" for size in rows)
    return (
        replace(beside, hugging_face=a, layout=COLUMNS if cut == 1 else REPLICATED, sizes=a_sizes),
        replace(beside, hugging_face=b, layout=slot.layout if cut == 0 else REPLICATED, sizes=b_sizes),
    )


def adapter_weights(weight: Weight, dim: int) -> tuple[Weight, Weight]:
    """Return a weight's adapter weights A and B."""
    a, b = (Weight(slot, weight.layer, weight.expert) for slot in adapter_slots(weight.slot, dim))
    return a, b


def count_adapters(policy: PolicyConfig) -> int:
    """Return the number of parameters in all adapters."""
    found = {(weight.slot, weight.layer) for weight in adapted_weights(policy)}
    dim = policy.megatron_cfg.peft.dim
    return sum(part.count(policy.model) for slot, _ in found for part in adapter_slots(slot, dim))


def adapter_problems(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield problems for names that match no linear layer, and for layers that cannot have an adapter."""
    peft = policy.megatron_cfg.peft
    if not peft.enabled:
        return
    names = [name for weight in all_weights(policy.model) if (name := linear_name(weight)) is not None]
    last = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
    found = True
    for key in ("target_modules", "exclude_modules"):
        for number, pattern in enumerate(getattr(peft, key)):
            if not any(map(_matcher([pattern]), names)):
                found = False
                what = f"no linear layer matches {pattern!r}"
                remedy = f"name {last}, or whole names such as {names[0]}, with * for any text"
                yield Problem("not-found", f"{KEY}.{key}.{number}", what, remedy, ("model",))
    adapted = adapted_weights(policy)
    if found and not adapted:
        what = "every linear layer is excluded, and nothing is left to train"
        yield Problem("no-signal", f"{KEY}.exclude_modules", what, "name fewer", (f"{KEY}.target_modules",))
    expert = next((weight for weight in adapted if weight.expert is not None), None)
    in_one_product = policy.megatron_cfg.transformer_impl == "transformer_engine"
    if expert is not None and (expert.slot.stacked or in_one_product):
        what = f"experts that are computed in one product have no adapters: {adapted[expert]}"
        remedy = "add '*.experts.*' to exclude_modules"
        related = (f"{KEY}.exclude_modules", "megatron_cfg.transformer_impl", "model")
        yield Problem("not-supported", f"{KEY}.target_modules", what, remedy, related)
