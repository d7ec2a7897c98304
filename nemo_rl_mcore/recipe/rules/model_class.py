"""Settings that a HybridModel of Megatron does not support."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.recipe.rules.feature import Rules

_MODEL_CLASS, _PATTERN = "megatron_cfg.model_class", "model.hybrid_layer_pattern"


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


def _own_pattern(policy: PolicyConfig) -> Iterator[Problem]:
    pattern = policy.model.hybrid_layer_pattern
    if pattern is not None and policy.model_class == "gpt":
        what = f"gpt does not go with policy.{_PATTERN}: {pattern} (it has attention in each layer)"
        yield Problem("incompatible", _MODEL_CLASS, what, "set it to auto", (_PATTERN,))


def _squared_relu(policy: PolicyConfig) -> Iterator[Problem]:
    if policy.megatron_cfg.bias_activation_fusion is True and not policy.model.gated:
        what = f"true with policy.model.activation_func: {policy.model.activation_func}, which has no gate to fuse"
        yield Problem(
            "incompatible",
            "megatron_cfg.bias_activation_fusion",
            what,
            "set it to auto or false",
            ("model.activation_func",),
        )


def _refused(policy: PolicyConfig, other: str, value: object, remedy: str, reason: str) -> Iterator[Problem]:
    if policy.model_class != "hybrid":
        return
    if policy.model.hybrid_layer_pattern is None:
        remedies = f"set policy.{_MODEL_CLASS}: gpt, or policy.{other}: {remedy}"
    else:
        remedies = f"set policy.{other}: {remedy}"
    what = f"{policy.megatron_cfg.model_class} does not go with policy.{other}: {value} ({reason})"
    yield Problem("incompatible", _MODEL_CLASS, what, remedies, (other,))


def _latents(policy: PolicyConfig) -> Iterator[Problem]:
    if policy.model.multi_latent_attention:
        why = "its layers have heads alone"
        yield from _refused(policy, "model.multi_latent_attention", "true", "false", why)


def _windows_and_sinks(policy: PolicyConfig) -> Iterator[Problem]:
    model = policy.model
    given = {
        "softmax_type": (model.softmax_type, "vanilla"),
        "sliding_window": (model.sliding_window, None),
        "add_bias_linear": (model.add_bias_linear, False),
    }
    for key, (value, plain) in given.items():
        if value != plain:
            shown, remedy = ("null" if one is None else str(one).lower() for one in (value, plain))
            why = "it counts attention and the rest as two layers, and has been run without alone"
            yield from _refused(policy, f"model.{key}", shown, remedy, why)


RULES = Rules(
    of_models=(_prediction_layers,),
    of_policies=(_overlapped_experts, _own_pattern, _squared_relu, _latents, _windows_and_sinks),
)
