"""How the samples of a step divide into optimizer steps, ranks and microbatches."""

import math
from collections.abc import Iterator

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.policy import PolicyConfig, TokenBudgetConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.recipe.rules.feature import Rules
from nemo_rl_mcore.recipe.rules.losses import one_step_per_rollout
from nemo_rl_mcore.recipe.rules.packing import refusal
from nemo_rl_mcore.recipe.rules.parallelism import OF_THE_LAYOUT


def _global_batch(config: RunConfig) -> Iterator[Problem]:
    """Yield batch sizes that ranks cannot share equally; a last microbatch may hold fewer samples."""
    ranks, batch = config.data_parallel_size, config.policy.train_global_batch_size
    if not isinstance(config.loop, RolloutConfig) and batch % ranks:
        yield Problem(
            "not-divisible",
            "policy.train_global_batch_size",
            f"{batch} is not divisible by the {ranks} data-parallel ranks",
            "change the global batch size or the number of ranks",
            OF_THE_LAYOUT,
        )


def _samples_of_a_rollout(config: RunConfig) -> Iterator[Problem]:
    name, loop, ranks = config.algorithm, config.loop, config.data_parallel_size
    if not isinstance(loop, RolloutConfig):
        return
    samples, batch = loop.samples_per_step, config.policy.train_global_batch_size
    factors = (f"{name}.num_prompts_per_step", f"{name}.num_generations_per_prompt")
    told = f"the {samples} samples of a step ({' * '.join(factors)})"
    if samples % ranks:
        yield Problem(
            "not-divisible",
            factors[0],
            f"{told} are not divisible by the {ranks} data-parallel ranks",
            "change their number, or that of the ranks",
            (*factors, *OF_THE_LAYOUT),
        )
        return
    fits = samples if one_step_per_rollout(config) else _divisor_near(batch, samples, ranks)
    if samples % batch:
        yield Problem(
            "not-divisible",
            "policy.train_global_batch_size",
            f"{batch} does not divide {told}",
            f"set it to a divisor, such as {fits}",
            factors,
        )
    elif batch % ranks:
        yield Problem(
            "not-divisible",
            "policy.train_global_batch_size",
            f"{batch} is not divisible by the {ranks} data-parallel ranks",
            f"set it to a multiple that divides {told}, such as {fits}",
            (*factors, *OF_THE_LAYOUT),
        )


def _budgets(policy: PolicyConfig) -> Iterator[Problem]:
    sections: tuple[tuple[str, TokenBudgetConfig], ...] = (
        ("sequence_packing", policy.sequence_packing),
        ("dynamic_batching", policy.dynamic_batching),
    )
    longest = policy.max_total_sequence_length
    for name, section in sections:
        for key in ("train_mb_tokens", "logprob_mb_tokens"):
            budget: int | None = getattr(section, key)
            if section.enabled and budget is not None and budget < longest:
                yield Problem(
                    "too-small",
                    f"{name}.{key}",
                    f"{budget} is below policy.max_total_sequence_length: {longest}, which one sample may take",
                    f"set it to {longest} or more, or lower max_total_sequence_length",
                    ("max_total_sequence_length",),
                )


def _virtual_pipeline(policy: PolicyConfig) -> Iterator[Problem]:
    chunks = policy.megatron_cfg.virtual_pipeline_model_parallel_size
    if policy.dynamic_batching.enabled and chunks is not None:
        reason = "the interleaved schedule needs microbatches of one shape"
        key = "megatron_cfg.virtual_pipeline_model_parallel_size"
        yield refusal("dynamic_batching", key, str(chunks), reason)


def _budget_of_a_pair(config: RunConfig) -> Iterator[Problem]:
    """Yield a token budget of training with room for the longest row and none for a sample of several."""
    budgets, rows = config.policy.token_budgets, config.rows_per_sample
    longest = config.policy.max_total_sequence_length
    if budgets is not None and longest <= budgets.of_training(rows) < rows * longest:
        yield Problem(
            "too-small",
            f"{budgets.section}.train_mb_tokens",
            f"{budgets.train} is below {rows} times policy.max_total_sequence_length: {longest}, which one sample of "
            f"{rows} rows may take",
            f"set it to {rows * longest} or more, or lower max_total_sequence_length",
            ("policy.max_total_sequence_length",),
        )


def _divisor_near(wanted: int, number: int, ranks: int) -> int:
    """Return the largest divisor of a number that is a multiple of `ranks` and, if given, at most the wanted one."""
    shares = number // ranks
    pairs = (
        (share, shares // share)
        for share in range(1, min(math.isqrt(shares), _TRIED) + 1)
        if not shares % share
    )
    fitting = [share * ranks for pair in pairs for share in pair]
    return max((size for size in fitting if size <= wanted), default=ranks)


_TRIED = 1_000_000
"""Divisors that are looked for; of a number above its square the remedy names one that is near enough."""


RULES = Rules(
    of_policies=(_budgets, _virtual_pipeline),
    of_runs=(_global_batch, _samples_of_a_rollout, _budget_of_a_pair),
)
