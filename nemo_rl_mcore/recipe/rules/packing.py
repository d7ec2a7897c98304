"""What does not go with sequence packing: all of it stands here."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem, has_no_effect
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.recipe.rules.feature import Rules
from nemo_rl_mcore.recipe.rules.fused_logprobs import FUSED, Guardrail

_PACKING = "sequence_packing"
_FUSED_PACKED = "megatron_cfg.fused_linear_logprobs_packed"


def fused_guardrail(policy: PolicyConfig) -> Guardrail:
    """Return how packing stands with the fused log-probabilities, where they are on."""
    packed, allowed = policy.sequence_packing.enabled, policy.megatron_cfg.fused_linear_logprobs_packed
    return Guardrail(
        f"{_PACKING}.enabled",
        str(packed).lower(),
        not packed or allowed,
        "the fused path reads padded rows unless packed ones are allowed",
        "false",
        allowed_by=(_FUSED_PACKED,),
    )


def _fused(policy: PolicyConfig) -> Iterator[Problem]:
    if policy.megatron_cfg.use_fused_linear_logprobs:
        yield from fused_guardrail(policy).problems()


def _nothing_to_allow(policy: PolicyConfig) -> Iterator[Problem]:
    needed = {
        f"{_PACKING}.enabled": policy.sequence_packing.enabled,
        FUSED: policy.megatron_cfg.use_fused_linear_logprobs,
    }
    off = tuple(key for key, on in needed.items() if not on)
    if policy.megatron_cfg.fused_linear_logprobs_packed and off:
        because = f"with {' and '.join(f'policy.{key}: false' for key in off)}"
        yield has_no_effect(_FUSED_PACKED, True, because, *off)


def _dynamic_batching(policy: PolicyConfig) -> Iterator[Problem]:
    if policy.sequence_packing.enabled and policy.dynamic_batching.enabled:
        yield refusal(_PACKING, "dynamic_batching.enabled", "true", "a microbatch has one size")


def _prediction_layers(policy: PolicyConfig) -> Iterator[Problem]:
    layers = policy.model.mtp_num_layers
    if policy.sequence_packing.enabled and layers:
        reason = "those layers would predict the tokens of the next sample"
        yield refusal(_PACKING, "model.mtp_num_layers", str(layers), reason)


def _balance_of_each_sample(policy: PolicyConfig) -> Iterator[Problem]:
    kind = policy.model.moe_router_load_balancing_type
    if policy.sequence_packing.enabled and policy.model.load_balancing_loss and kind == "seq_aux_loss":
        reason = "it balances each sample by itself"
        yield refusal(_PACKING, "model.moe_router_load_balancing_type", kind, reason)


def refusal(section: str, other: str, value: str, reason: str) -> Problem:
    """Return a way of sizing microbatches by tokens that does not go with another key of the policy."""
    return Problem(
        "incompatible",
        f"{section}.enabled",
        f"true does not go with policy.{other}: {value} ({reason})",
        f"set policy.{section}.enabled: false, or change the other key",
        (other,),
    )


RULES = Rules(
    of_policies=(_fused, _nothing_to_allow, _dynamic_batching, _prediction_layers, _balance_of_each_sample)
)
