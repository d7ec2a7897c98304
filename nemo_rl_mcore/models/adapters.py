"""Low-rank adapters: which weights get one, by Megatron's names of linear layers, and the weights it consists of."""

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
# Of two names, that of Megatron's local layers is the first.
_ALTERNATIVES = re.compile(r"\(\?:(.+?)\|.+\)")


@cache
def _layer_inside(slot: Slot) -> str | None:
    name = _ALTERNATIVES.sub(r"\1", slot.megatron).replace(r"(\d+)", "{expert}").replace("\\", "")
    linear = _LINEAR.fullmatch(name)
    return None if linear is None else linear[1]


def linear_name(weight: Weight) -> str | None:
    """Return what Megatron calls the linear layer of a weight, layers and experts counted over the whole model."""
    inside = None if weight.layer is None else _layer_inside(weight.slot)
    return None if inside is None else f"decoder.layers.{weight.layer}.{inside.format(expert=weight.expert)}"


def adapted_weights(policy: PolicyConfig) -> dict[Weight, str]:
    """Return the weights that have an adapter, with the names of their linear layers; none unless peft is enabled.

    Source: Megatron-Bridge, `ModuleMatcher`: a pattern is the last part of a name, or the whole with wildcards, and no
    pattern at all is every linear layer. As there, with experts in one product, these are left out of that.
    """
    peft = policy.megatron_cfg.peft
    if not peft.enabled:
        return {}
    wanted, unwanted = _matcher(peft.target_modules), _matcher(peft.exclude_modules)
    adapted: dict[Weight, str] = {}
    for weight in all_weights(policy.model):
        name = linear_name(weight)
        if name is None or unwanted(name):
            continue
        if wanted(name) if peft.target_modules else weight.expert is None:
            adapted[weight] = name
    return adapted


def _matcher(patterns: Sequence[str]):
    either = "|".join(_as_regex(pattern) for pattern in patterns) or r"(?!)"
    return re.compile(either).fullmatch


def _as_regex(pattern: str) -> str:
    wildcards = ".*".join(map(re.escape, pattern.split("*")))
    return rf"{wildcards}|(?:.*\.)?{re.escape(pattern)}"


@cache
def adapter_slots(slot: Slot, dim: int) -> tuple[Slot, Slot]:
    """Return the weights A and B of an adapter beside a weight; A is called by the first of the tensors beside it.

    A [dim, inputs] is cut where ranks have parts of the inputs, B [outputs, dim] where they have parts of the outputs,
    in the order of the weight's.
    """
    modules = [name.removesuffix(".weight") for name in slot.hugging_face]
    rows, columns = zip(*(sizes.split() for sizes in slot.sizes), strict=True)
    inputs, outputs = slot.layout.dimension == 1, slot.layout.dimension == 0
    beside = replace(slot, prefix=_PEFT_PREFIX + slot.prefix)
    return (
        replace(
            beside,
            hugging_face=(f"{modules[0]}.{LORA_A}.weight",),
            layout=COLUMNS if inputs else REPLICATED,
            sizes=(f"{dim} {columns[0]}",),
        ),
        replace(
            beside,
            hugging_face=tuple(f"{module}.{LORA_B}.weight" for module in modules),
            layout=slot.layout if outputs else REPLICATED,
            sizes=tuple(f"{size} {dim}" for size in rows),
        ),
    )


def adapter_weights(weight: Weight, dim: int) -> tuple[Weight, Weight]:
    """Return A and B beside a weight."""
    a, b = (Weight(slot, weight.layer, weight.expert) for slot in adapter_slots(weight.slot, dim))
    return a, b


def count_adapters(policy: PolicyConfig) -> int:
    """Return how many numbers all adapters have."""
    found = {(weight.slot, weight.layer) for weight in adapted_weights(policy)}
    dim = policy.megatron_cfg.peft.dim
    return sum(part.count(policy.model) for slot, _ in found for part in adapter_slots(slot, dim))


def adapter_problems(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield names that match no linear layer, and layers that cannot have an adapter."""
    peft = policy.megatron_cfg.peft
    if not peft.enabled:
        return
    names = {
        name: weight for weight in all_weights(policy.model) if (name := linear_name(weight)) is not None
    }
    found = True
    for key in ("target_modules", "exclude_modules"):
        for number, pattern in enumerate(getattr(peft, key)):
            if not any(map(_matcher([pattern]), names)):
                found = False
                last = dict.fromkeys(name.rpartition(".")[2] for name in names)
                what = f"no linear layer of the model is called {pattern!r}"
                remedy = (
                    f"name {', '.join(last)}, or whole names such as {next(iter(names))}, with * for any text"
                )
                yield Problem("not-found", f"{KEY}.{key}.{number}", what, remedy, ("model",))
    adapted = adapted_weights(policy)
    if found and not adapted:
        what = "every linear layer is excluded, and nothing is left to train"
        yield Problem("no-signal", f"{KEY}.exclude_modules", what, "name fewer", (f"{KEY}.target_modules",))
    of_experts = [(weight, name) for weight, name in adapted.items() if weight.expert is not None]
    if of_experts and (
        of_experts[0][0].slot.stacked or policy.megatron_cfg.transformer_impl == "transformer_engine"
    ):
        what = f"experts that are computed in one product have no adapters: {of_experts[0][1]}"
        remedy = "add '*.experts.*' to exclude_modules"
        related = (f"{KEY}.exclude_modules", "megatron_cfg.transformer_impl", "model")
        yield Problem("not-supported", f"{KEY}.target_modules", what, remedy, related)
