"""What the fused log-probabilities cannot honour; packing and context parallelism have their own files."""

from collections.abc import Iterator
from dataclasses import dataclass

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.recipe.rules.feature import Rules

FUSED = "megatron_cfg.use_fused_linear_logprobs"


@dataclass(frozen=True)
class Guardrail:
    """A rule between the fused log-probabilities and another key of the policy, and how it stands.

    allowed_by: keys that lift the rule when they are true.
    """

    other: str
    value: str
    ok: bool
    reason: str
    remedy: str
    allowed_by: tuple[str, ...] = ()

    def problems(self) -> Iterator[Problem]:
        """Yield the refusal, where there is one: it names both keys and what to set."""
        if not self.ok:
            settings = (*(f"{key}: true" for key in self.allowed_by), f"{self.other}: {self.remedy}")
            yield Problem(
                "incompatible",
                FUSED,
                f"true does not go with policy.{self.other}: {self.value} ({self.reason})",
                f"set {', '.join(f'policy.{setting}' for setting in settings)}, or policy.{FUSED}: false",
                (self.other, *self.allowed_by),
            )


def fused_guardrails(policy: PolicyConfig) -> Iterator[Guardrail]:
    """Yield every rule of the fused log-probabilities; empty when they are off."""
    megatron, generation = policy.megatron_cfg, policy.generation
    if not megatron.use_fused_linear_logprobs:
        return
    gather = megatron.distributed_data_parallel_config.overlap_param_gather
    all_logits = "filtering needs all logits of a token at once"
    rules: tuple[tuple[str, object, object, str], ...] = (
        ("megatron_cfg.enabled", megatron.enabled, True, "only Megatron has the hook"),
        ("generation.top_k", generation.top_k, None, all_logits),
        ("generation.top_p", generation.top_p, 1.0, all_logits),
        (
            "megatron_cfg.distributed_data_parallel_config.overlap_param_gather",
            gather,
            False,
            "the output weight would be read while its gather is in flight",
        ),
    )
    for other, value, needed, reason in rules:
        yield Guardrail(other, _yaml(value), value == needed, reason, _yaml(needed))


def _guardrails(policy: PolicyConfig) -> Iterator[Problem]:
    for guardrail in fused_guardrails(policy):
        yield from guardrail.problems()


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower()


RULES = Rules(of_policies=(_guardrails,))
