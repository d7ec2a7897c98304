"""Microbatches that are sized by tokens: dynamic batching and sequence packing; paths are relative to `policy`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nemo_rl_mcore.config.base import PositiveInt, Problem, StrictModel

if TYPE_CHECKING:
    from nemo_rl_mcore.config.policy import PolicyConfig

PACKING, DYNAMIC = "sequence_packing", "dynamic_batching"
VIRTUAL = "megatron_cfg.virtual_pipeline_model_parallel_size"


class TokenBudgetConfig(StrictModel):
    """How many tokens a microbatch may hold."""

    enabled: bool = False
    """Whether microbatches are sized this way; train_micro_batch_size and logprob_batch_size then cut nothing."""
    train_mb_tokens: PositiveInt | None = None
    """Tokens of a training microbatch; null is max_total_sequence_length times the rows of train_micro_batch_size."""
    logprob_mb_tokens: PositiveInt | None = None
    """Tokens of a log-probability microbatch; null is max_total_sequence_length * logprob_batch_size."""
    sequence_length_round: PositiveInt = 64
    """A microbatch's padded length is rounded up to a multiple of this where the budget has room."""


class SequencePackingConfig(TokenBudgetConfig):
    """Several samples in one row without padding; a sample sees no token of another one."""

    algorithm: Literal["modified_first_fit_decreasing", "first_fit_decreasing"] = (
        "modified_first_fit_decreasing"
    )
    """How samples are assigned to rows; both names mean first-fit decreasing."""


class DynamicBatchingConfig(TokenBudgetConfig):
    """Samples of like length in one microbatch, as many as a token budget takes, padded to its own longest one."""


@dataclass(frozen=True)
class TokenBudgets:
    """The token budgets of a policy: the section they come from, and their values.

    packed: whether rows of the batch share rows of the model; else each has a row of its own.
    train_by_rows: whether `train` was left out of the section, and is that of samples of one row.
    """

    section: str
    packed: bool
    train: int
    logprob: int
    length_round: int
    train_by_rows: bool = False

    def of_training(self, rows_per_sample: int) -> int:
        """The tokens of a training microbatch for a loss whose samples have so many rows."""
        return self.train * rows_per_sample if self.train_by_rows else self.train


def token_budgets(policy: PolicyConfig) -> TokenBudgets | None:
    """What sizes the policy's microbatches; None where they have a fixed number of rows."""
    packed = policy.sequence_packing.enabled
    if not packed and not policy.dynamic_batching.enabled:
        return None
    section = policy.sequence_packing if packed else policy.dynamic_batching
    longest = policy.max_total_sequence_length
    return TokenBudgets(
        section=f"policy.{PACKING if packed else DYNAMIC}",
        packed=packed,
        train=section.train_mb_tokens or longest * policy.train_micro_batch_size,
        logprob=section.logprob_mb_tokens or longest * policy.logprob_batch_size,
        length_round=section.sequence_length_round,
        train_by_rows=section.train_mb_tokens is None,
    )


def batching_problems(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield budgets that a sample may not fit, and what does not go with sizing microbatches by tokens."""
    if policy.sequence_packing.enabled and policy.dynamic_batching.enabled:
        yield _refusal(PACKING, f"{DYNAMIC}.enabled", "true", "a microbatch has one size")
    for name, section in ((PACKING, policy.sequence_packing), (DYNAMIC, policy.dynamic_batching)):
        if section.enabled:
            yield from _budget_problems(name, section, policy.max_total_sequence_length)
    if policy.sequence_packing.enabled:
        yield from _packing_problems(policy)
    chunks = policy.megatron_cfg.virtual_pipeline_model_parallel_size
    if policy.dynamic_batching.enabled and chunks is not None:
        reason = "the interleaved schedule needs microbatches of one shape"
        yield _refusal(DYNAMIC, VIRTUAL, str(chunks), reason)


def _budget_problems(name: str, section: TokenBudgetConfig, longest: int) -> Iterator[Problem]:
    for key in ("train_mb_tokens", "logprob_mb_tokens"):
        budget: int | None = getattr(section, key)
        if budget is not None and budget < longest:
            yield Problem(
                f"{name}.{key}",
                f"{budget} is below policy.max_total_sequence_length: {longest}, which one sample may take",
                f"set it to {longest} or more, or lower max_total_sequence_length",
                ("max_total_sequence_length",),
            )


def _packing_problems(policy: PolicyConfig) -> Iterator[Problem]:
    model = policy.model
    if model.mtp_num_layers:
        reason = "those layers would predict the tokens of the next sample"
        yield _refusal(PACKING, "model.mtp_num_layers", str(model.mtp_num_layers), reason)
    kind = model.moe_router_load_balancing_type
    if model.load_balancing_loss and kind == "seq_aux_loss":
        reason = "it balances each sample by itself"
        yield _refusal(PACKING, "model.moe_router_load_balancing_type", kind, reason)


def _refusal(name: str, other: str, value: str, reason: str) -> Problem:
    return Problem(
        f"{name}.enabled",
        f"true does not go with policy.{other}: {value} ({reason})",
        f"set policy.{name}.enabled: false, or change the other key",
        (other,),
    )
