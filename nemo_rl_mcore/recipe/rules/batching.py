"""Rules for dividing a step's samples into optimizer steps, ranks and microbatches, and for their length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl_mcore.config.base import Rule, Rules, either
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.recipe.rules.parallelism import OF_THE_LAYOUT, VIRTUAL

if TYPE_CHECKING:
    from nemo_rl_mcore.config.run_config import RunConfig

_BATCH, _LENGTH = "policy.train_global_batch_size", "policy.max_total_sequence_length"
_PACKING, _DYNAMIC = "sequence_packing.enabled", "dynamic_batching.enabled"
_PROMPTS, _GENERATIONS = "loop.num_prompts_per_step", "loop.num_generations_per_prompt"
_TRIED = 1_000_000
"""Number of candidate divisors; for numbers above its square the remedy names an approximate one."""


def divisor_near(wanted: int, number: int, ranks: int) -> int:
    """Return the largest divisor of a number that is a multiple of `ranks` and, if there is one, at most `wanted`."""
    shares = number // ranks
    pairs = (
        (share, shares // share)
        for share in range(1, min(math.isqrt(shares), _TRIED) + 1)
        if not shares % share
    )
    fitting = [share * ranks for pair in pairs for share in pair]
    return max((size for size in fitting if size <= wanted), default=ranks)


def _batch_sizes(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield rules for batch sizes that ranks cannot share equally; the last microbatch may have fewer samples."""
    batch, ranks = config.policy.train_global_batch_size, config.data_parallel_size
    of_ranks = f"{ranks} data-parallel ranks"
    if config.prompts_key == _BATCH:
        fix = f"set it to a multiple of {ranks}, or change the number of ranks"
        yield Rule(
            "not-divisible",
            _BATCH,
            batch % ranks,
            OF_THE_LAYOUT,
            fix,
            says=f"{batch} cannot be divided evenly among {of_ranks}",
        )
        return
    samples, factors = config.samples_per_step, (_PROMPTS, _GENERATIONS)
    if samples % ranks:
        says = f"a step's {samples} samples cannot be divided evenly among {of_ranks}"
        fix = f"make {' * '.join(map(config.key, factors))} a multiple of {ranks}"
        yield Rule("not-divisible", _PROMPTS, True, (*factors, *OF_THE_LAYOUT), fix, says=says)
        return
    whole = config.streams or (config.gradient is not None and config.gradient.force_on_policy_ratio)
    fits = samples if whole else divisor_near(batch, samples, ranks)
    if samples % batch:
        fix, why = f"set it to a divisor, such as {fits}", f"a step has {samples} samples"
        yield Rule("not-divisible", _BATCH, True, factors, fix, why)
    elif batch % ranks:
        fix = f"set it to a multiple of {ranks} that divides the step's {samples} samples, such as {fits}"
        related = (*factors, *OF_THE_LAYOUT)
        yield Rule(
            "not-divisible",
            _BATCH,
            True,
            related,
            fix,
            says=f"{batch} cannot be divided evenly among {of_ranks}",
        )


def _pair_budget(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    budgets, rows = config.policy.token_budgets, config.rows_per_sample
    longest = config.policy.max_total_sequence_length
    if budgets is not None:
        yield Rule(
            "too-small",
            f"{budgets.section}.train_mb_tokens",
            longest <= budgets.of_training(rows) < rows * longest,
            (_LENGTH,),
            f"set it to {rows * longest} or more, or lower max_total_sequence_length",
            f"a sample has {rows} rows",
        )


def _room(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield rules for a sequence length without room for the longest prompt and a response."""
    policy, data = config.policy, config.data
    prompt, response, longest = (
        data.max_prompt_length or 1,
        policy.reserved_tokens,
        policy.max_total_sequence_length,
    )
    if policy.generation.fit_to_sequence and data.max_input_seq_length:
        return  # rows that leave no token for an answer are too long, see data.overlong
    fix = f"set it to {prompt + response}, or lower the other two lengths"
    # NeMo RL's recipes compute the other two from it, so they would grow with it; the number of positions would not.
    computed = longest in (data.max_input_seq_length, response)
    if computed or prompt + response > policy.model.shape.longest_sequence:
        fix = f"lower these to a total of at most {min(longest, policy.model.shape.longest_sequence)}"
    related = ("data.max_input_seq_length", "data.num_digits", "policy.generation.max_new_tokens")
    yield Rule(
        "too-small",
        _LENGTH,
        prompt + response > longest,
        related if data.max_input_seq_length else ("data.dataset_name", *related),
        fix,
        says=f"{longest} is too short for the longest prompt ({prompt} tokens) and a response ({response} tokens)",
    )


POLICY_RULES: Rules[PolicyConfig] = (
    *(
        Rule[PolicyConfig](
            "too-small",
            f"{section}.{key}",
            lambda own, section=section, key=key: (
                getattr(own, section).enabled
                and (getattr(getattr(own, section), key) or math.inf) < own.max_total_sequence_length
            ),
            ("max_total_sequence_length",),
            lambda own: (
                f"set it to {own.max_total_sequence_length} or more, or lower max_total_sequence_length"
            ),
            "a single sample may have that many tokens",
        )
        for section in ("sequence_packing", "dynamic_batching")
        for key in ("train_mb_tokens", "logprob_mb_tokens")
    ),
    either(
        "incompatible",
        {_DYNAMIC: False, VIRTUAL: None},
        "the interleaved schedule needs microbatches of equal shape",
    ),
    either(
        "incompatible",
        {_PACKING: False, _DYNAMIC: False},
        "only one of them can set the size of a microbatch",
    ),
    either(
        "incompatible",
        {_PACKING: False, "model.mtp_num_layers": None},
        "prediction layers would predict tokens of the next sample in a row",
    ),
    either(
        "incompatible",
        {_PACKING: False, "model.moe_router_load_balancing_type": "aux_loss"},
        "that loss is computed per sample, and a packed row has several",
        where=lambda own: own.model.load_balancing_loss,
    ),
)
RUN_RULES: Rules[RunConfig] = (
    _batch_sizes,
    _pair_budget,
    _room,
    Rule(
        "too-small",
        _LENGTH,
        # An agent may show less in its next call.
        lambda run: (
            run.max_rollout_turns > 1
            and run.env.endpoint is None
            and run.policy.max_total_sequence_length < 1 + 2 * run.policy.reserved_tokens
        ),
        ("policy.generation.max_new_tokens", "loop.max_rollout_turns"),
        lambda run: (
            f"set it to {1 + 2 * run.policy.reserved_tokens} and what prompts and observations take, or "
            f"{run.algorithm}.max_rollout_turns: 1"
        ),
        "an episode would have no room for a second turn",
    ),
)
