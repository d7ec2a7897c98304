"""Settings that a HybridModel of Megatron does not support."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.rules.feature import Rules

_MODEL_CLASS = "megatron_cfg.model_class"


def _prediction_layers(policy: PolicyConfig) -> Iterator[Problem]:
    layers = policy.model.mtp_num_layers
    if layers:
        yield from _refused(
            policy,
            "model.mtp_num_layers",
            layers,
            "null",
            "those of such a model are Transformer Engine's alone",
        )


def _overlapped_experts(policy: PolicyConfig) -> Iterator[Problem]:
    if policy.megatron_cfg.overlap_moe_expert_parallel_comm:
        other = "megatron_cfg.overlap_moe_expert_parallel_comm"
        yield from _refused(policy, other, "true", "false", "the schedule knows no such model")


def _refused(policy: PolicyConfig, other: str, value: object, remedy: str, reason: str) -> Iterator[Problem]:
    if policy.megatron_cfg.model_class == "hybrid":
        yield Problem(
            "incompatible",
            _MODEL_CLASS,
            f"hybrid does not go with policy.{other}: {value} ({reason})",
            f"set policy.{_MODEL_CLASS}: gpt, or policy.{other}: {remedy}",
            (other,),
        )


RULES = Rules(of_models=(_prediction_layers,), of_policies=(_overlapped_experts,))
