"""Guardrails of `use_fused_linear_logprobs`: what the fused path cannot honour is refused at load."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl_mcore.config.base import Problem

if TYPE_CHECKING:
    from nemo_rl_mcore.config.policy import PolicyConfig

FUSED_KEY = "megatron_cfg.use_fused_linear_logprobs"


@dataclass(frozen=True)
class Guardrail:
    """A rule between two keys (relative to `policy`), and how it stands."""

    key: str
    other: str
    value: str
    ok: bool
    reason: str
    remedy: str

    def problem(self) -> Problem:
        """The refusal: it names both keys and what to set."""
        return Problem(
            self.key,
            f"true does not go with policy.{self.other}: {self.value} ({self.reason})",
            f"set policy.{self.other}: {self.remedy}, or policy.{self.key}: false",
            (self.other,),
        )


def fused_guardrails(policy: "PolicyConfig") -> Iterator[Guardrail]:
    """Yield every rule of the fused log-probabilities; empty when they are off."""
    megatron, generation = policy.megatron_cfg, policy.generation
    if not megatron.use_fused_linear_logprobs:
        return
    context = megatron.context_parallel_size
    gather = megatron.distributed_data_parallel_config.overlap_param_gather
    rules: tuple[tuple[str, object, bool, str, str], ...] = (
        ("megatron_cfg.enabled", megatron.enabled, megatron.enabled, "only Megatron has the hook", "true"),
        (
            "megatron_cfg.context_parallel_size",
            context,
            context == 1,
            "the fused path reads whole sequences",
            "1",
        ),
        (
            "sequence_packing.enabled",
            policy.sequence_packing.enabled,
            not policy.sequence_packing.enabled,
            "the fused path reads padded rows",
            "false",
        ),
        (
            "generation.top_k",
            generation.top_k,
            generation.top_k is None,
            "filtering needs all logits of a token at once",
            "null",
        ),
        (
            "generation.top_p",
            generation.top_p,
            generation.top_p == 1,
            "filtering needs all logits of a token at once",
            "1.0",
        ),
        (
            "megatron_cfg.distributed_data_parallel_config.overlap_param_gather",
            gather,
            not gather,
            "the output weight would be read while its gather is in flight",
            "false",
        ),
    )
    for other, value, ok, reason, remedy in rules:
        shown = "null" if value is None else str(value).lower()
        yield Guardrail(FUSED_KEY, other, shown, ok, reason, remedy)
