"""The numbers of a step: what was sampled, and what training made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_rl_mcore.driver.algorithms.advantages import group_statistics, rows_with_signal
from nemo_rl_mcore.driver.rollouts.episode_rows import EpisodeRows
from nemo_rl_mcore.driver.rollouts.metrics import episode_metrics
from nemo_rl_mcore.driver.rollouts.player import Rollout, prompt_lengths
from nemo_rl_mcore.rank.sums import EXTREMA, combine_steps, neutral_value
from nemo_rl_mcore.rank.train_step import EMPTY_STEP


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """Measure rewards, lengths and advantages of the answers, where the batch has advantages.

    An answer is an episode, whose prompt is that of its first row. Of those that were dropped only the tokens count
    that ran through the model, and how many they are; where nothing else is left, there is no other metric.
    """
    batch, episodes = rollout.batch, EpisodeRows.of(rollout.batch)
    metrics = {"train/total_num_tokens": float(batch["input_lengths"].sum())} | episode_metrics(batch)
    if not len(episodes.first):
        return metrics
    prompt_index = episodes.one_each(batch["prompt_index"])
    environment_rewards = episodes.one_each(rollout.environment_rewards)
    response_lengths = episodes.total(batch["token_mask"].sum(1))
    with_signal = rows_with_signal(prompt_index, episodes.one_each(batch["rewards"]))
    metrics |= {
        "train/reward": float(environment_rewards.mean()),
        **_spread(environment_rewards, prompt_index),
        "train/mean_prompt_length": float(episodes.one_each(prompt_lengths(batch)).float().mean()),
        "train/mean_gen_tokens_per_sample": float(response_lengths.mean()),
        "train/max_gen_tokens_per_sample": float(response_lengths.max()),
        "train/truncation_rate": float((~episodes.one_each(batch["finished"])).float().mean()),
        "train/groups_with_signal": float(with_signal.float().mean()),
    }
    if "advantages" in batch:
        total = episodes.joined(batch["advantages"] * batch["token_mask"]).sum()
        metrics["train/advantages_mean"] = float(total / response_lengths.sum())
    return metrics


def _spread(rewards: torch.Tensor, prompt_index: torch.Tensor) -> dict[str, float]:
    """Return extrema and unbiased deviation of [B] rewards, of all and, on the mean, of those to one prompt."""
    one_group = torch.zeros_like(prompt_index)
    return {
        "train/reward_min": float(rewards.min()),
        "train/reward_max": float(rewards.max()),
        "train/reward_std": float(group_statistics(one_group, rewards, leave_one_out=False).std[0]),
        "train/reward_std_within_groups": float(
            group_statistics(prompt_index, rewards, leave_one_out=False).std.mean()
        ),
    }


def train_metrics(result: Mapping[str, Any], prefix: str = "train") -> dict[str, float]:
    """Return one number a metric for all optimizer steps of a rollout; the extrema of nothing are left out."""
    per_step: Mapping[str, list[float]] = result["all_mb_metrics"]
    counts = per_step["global_valid_seqs"], per_step["global_valid_toks"]
    combined = {
        name: value
        for name, kind in result["metric_kinds"].items()
        if (value := combine_steps(kind, per_step[name], *counts)) != neutral_value(kind)
        or kind not in EXTREMA
    }
    combined |= {name: sum(per_step[name]) for name in ("global_valid_seqs", "global_valid_toks")}
    combined |= {name: per_step[name][-1] for name in ("lr", "wd")}
    norms = [
        norm
        for norm, reason in zip(result["grad_norm"].tolist(), result["skip_reasons"], strict=True)
        if reason != EMPTY_STEP
    ]
    combined["grad_norm"] = sum(norms) / len(norms) if norms else 0.0
    combined["update_successful"] = float(result["update_successful"])
    metrics = {f"{prefix}/{name}": value for name, value in combined.items()}
    if (peak := result.get("peak_memory_gib")) is not None:
        metrics[f"performance/{'' if prefix == 'train' else f'{prefix}_'}peak_memory_gib"] = peak
    return metrics


def join_results(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what one `train` would have returned for the optimizer steps of several, for `train_metrics`."""
    names = dict.fromkeys(name for result in results for name in result["all_mb_metrics"])
    kinds = {name: kind for result in results for name, kind in result["metric_kinds"].items()}

    def steps_of(name: str, result: Mapping[str, Any]) -> list[float]:
        # A step may lack a metric that others have, such as the extrema of nothing.
        missing = [neutral_value(kinds[name])] * len(result["skip_reasons"]) if name in kinds else []
        return result["all_mb_metrics"].get(name, missing)

    row_tables = [result["row_table"] for result in results if "row_table" in result]
    return {
        **({"row_table": torch.cat(row_tables)} if row_tables else {}),
        "all_mb_metrics": {
            name: [value for result in results for value in steps_of(name, result)] for name in names
        },
        "metric_kinds": kinds,
        "grad_norm": torch.cat([result["grad_norm"] for result in results]),
        "update_successful": all(result["update_successful"] for result in results),
        "peak_memory_gib": results[-1].get("peak_memory_gib"),
        "skip_reasons": [reason for result in results for reason in result["skip_reasons"]],
    }
