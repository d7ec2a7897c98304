"""Batch sizes of a rehearsal: as many optimizer steps a rollout as the recipe has, over a few rows each."""

from __future__ import annotations

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import Tree
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.tools.rehearse.layouts import Layout

_ROWS = 4
"""Of an optimizer step, on each data-parallel rank."""
_STEPS = 4
"""Optimizer steps of a rollout at most."""


def batch_keys(config: RunConfig, layout: Layout, longest: int) -> Tree:
    """Return the keys of batches; longest: tokens of a row."""
    policy, loop = config.policy, config.loop
    keys: Tree = {
        "policy.train_micro_batch_size": min(2, policy.train_micro_batch_size),
        "policy.logprob_batch_size": min(2, policy.logprob_batch_size),
        "policy.generation_batch_size": policy.generation_batch_size and min(4, policy.generation_batch_size),
    }
    if value := getattr(config, "value", None):
        keys["value.train_micro_batch_size"] = value.train_micro_batch_size and min(
            2, value.train_micro_batch_size
        )
    keys |= _budgets(config, longest)
    if isinstance(loop, RolloutConfig):
        return keys | _of_rollouts(config, loop, layout)
    answers = getattr(loop, "num_generations_per_prompt", None)
    more: Tree = {"policy.train_global_batch_size": _ROWS * layout.data}
    if answers:
        more[f"{config.algorithm}.num_generations_per_prompt"] = min(4, answers)
    return keys | more | _asynchrony(config, _ROWS * layout.data)


def _of_rollouts(config: RunConfig, loop: RolloutConfig, layout: Layout) -> Tree:
    steps = max(1, loop.samples_per_step // config.policy.train_global_batch_size)
    steps = steps if steps <= _STEPS else 2
    answers = next(size for size in (4, 2, 1) if loop.num_generations_per_prompt >= size)
    prompts = steps * layout.data * (_ROWS // answers)
    streams = config.streams and prompts == 1
    prompts *= 2 if streams else 1
    keys: Tree = {
        f"{config.algorithm}.num_prompts_per_step": prompts,
        f"{config.algorithm}.num_generations_per_prompt": answers,
        "policy.train_global_batch_size": prompts * answers // steps,
    }
    if loop.use_dynamic_sampling:
        keys[f"{config.algorithm}.batch_multiplier"] = float(round(max(1.0, loop.batch_multiplier)))
    return keys | _asynchrony(config, prompts)


def _asynchrony(config: RunConfig, prompts: int) -> Tree:
    section = config.asynchrony
    if not section.enabled:
        return {}
    keys: Tree = {
        "min_groups_for_streaming_train": max(1, prompts // 2) if config.streams else None,
        "max_inflight_prompts": section.max_inflight_prompts and min(prompts, section.max_inflight_prompts),
        "max_trajectory_age_steps": min(2, section.max_trajectory_age_steps),
    }
    return {f"{config.asynchrony_key}.{key}": value for key, value in keys.items()}


def _budgets(config: RunConfig, longest: int) -> Tree:
    """Scale token budgets with the longest row; they hold two at least, which may be a pair."""
    policy, keys = config.policy, Tree()
    for name in ("sequence_packing", "dynamic_batching"):
        section = getattr(policy, name)
        for key in ("train_mb_tokens", "logprob_mb_tokens"):
            given = getattr(section, key)
            rows = given and given // policy.max_total_sequence_length
            keys[f"policy.{name}.{key}"] = given and longest * max(2, min(4, rows))
        keys[f"policy.{name}.sequence_length_round"] = min(16, section.sequence_length_round)
    return keys
