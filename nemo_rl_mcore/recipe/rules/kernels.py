"""Requirements of fused kernels, and of parts that are computed again."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem, has_no_effect
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.recipe.rules.feature import Rules

_PARTS, _ACCUMULATION = "megatron_cfg.recompute_modules", "megatron_cfg.gradient_accumulation_fusion"
_EXPERTS, _SHARED = "model.num_moe_experts", "model.moe_shared_expert_intermediate_size"
OF_ENGINE = frozenset(("layernorm", "moe_act"))
"""Parts that are computed again with Transformer Engine alone."""
_NEEDED = {"moe": _EXPERTS, "moe_act": _EXPERTS, "shared_experts": _SHARED}
"""The key of a model that has such a part."""


def _parts(policy: PolicyConfig) -> tuple[str, ...]:
    megatron = policy.megatron_cfg
    selective = megatron.activation_checkpointing and megatron.recompute_granularity == "selective"
    return megatron.recompute_modules or () if selective else ()


def _parts_that_no_layer_has(policy: PolicyConfig) -> Iterator[Problem]:
    for part in _parts(policy):
        needed = _NEEDED.get(part, "")
        if needed and not getattr(policy.model, needed.removeprefix("model.")):
            yield has_no_effect(_PARTS, part, f"in a model with policy.{needed}: null", needed)


def _parts_on_cpu(config: RunConfig) -> Iterator[Problem]:
    for part in _parts(config.policy):
        if part in OF_ENGINE and config.cluster.on_cpu:
            yield _needs_gpus(_PARTS, part, "leave it out, or set recompute_granularity: full")


def _accumulation_on_cpu(config: RunConfig) -> Iterator[Problem]:
    if config.policy.megatron_cfg.gradient_accumulation_fusion is True and config.cluster.on_cpu:
        yield _needs_gpus(_ACCUMULATION, "true", "set it to auto or false")


def _needs_gpus(key: str, given: str, remedy: str) -> Problem:
    what = f"{given} needs GPUs, and cluster.gpus_per_node is 0"
    return Problem("requires", f"policy.{key}", what, remedy, ("cluster.gpus_per_node",))


RULES = Rules(of_models=(_parts_that_no_layer_has,), of_runs=(_parts_on_cpu, _accumulation_on_cpu))
