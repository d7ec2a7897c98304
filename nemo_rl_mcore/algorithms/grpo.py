"""GRPO: answer prompts, score the answers, compare them within their group, train; then the next step.

No Ray and no Megatron here: the policy and the engine come in behind `interfaces`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from nemo_rl_mcore.algorithms.advantages import make_advantage_estimator
from nemo_rl_mcore.algorithms.mismatch import check_mismatch
from nemo_rl_mcore.algorithms.rewards import penalize_overlong, rows_with_signal, scale_rewards
from nemo_rl_mcore.algorithms.rollout import Rollout, RolloutCollector
from nemo_rl_mcore.algorithms.run_checkpoints import RunCheckpoints
from nemo_rl_mcore.algorithms.skip_guard import SkipGuard
from nemo_rl_mcore.config import GRPOMasterConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import PromptSource
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.interfaces import PolicyInterface
from nemo_rl_mcore.losses import ClippedPGLossFn
from nemo_rl_mcore.observability import Sample
from nemo_rl_mcore.training.metrics import EXTREMA, combine_steps, neutral_value
from nemo_rl_mcore.training.train_step import EMPTY_STEP


class StepObserver(Protocol):
    """What watches the run: timed phases, metrics, samples."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a phase of the step."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a finished step."""
        ...

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """Keep answers for the report."""
        ...


@dataclass(frozen=True)
class GRPO:
    """A GRPO run over its parts; `run` is the algorithm."""

    config: GRPOMasterConfig
    policy: PolicyInterface
    collector: RolloutCollector
    prompts: PromptSource
    observer: StepObserver
    checkpoints: RunCheckpoints = field(default_factory=RunCheckpoints)

    def run(self) -> None:
        """Train up to step `grpo.max_num_steps`, from the first one or from where the checkpoints say.

        Raises TooManySkippedStepsError when `max_consecutive_skips` optimizer steps in a row were skipped.
        """
        grpo = self.config.grpo
        loss_fn = ClippedPGLossFn(
            self.config.loss_fn, self.config.policy.megatron_cfg.use_fused_linear_logprobs
        )
        guard = SkipGuard(self.config.max_consecutive_skips, **self.checkpoints.restore(self.policy))
        behind = self.checkpoints.resumed_step
        engine = self.collector.generation
        engine.update_weights(behind or 0)
        if grpo.val_at_start and behind is None:
            self.observer.log(0, self.validate(0))
        for step in range((behind or 0) + 1, grpo.max_num_steps + 1):
            with self.observer.phase("generation"):
                rollout, sampling_metrics = self.roll_out(step)
            engine.offload()
            with self.observer.phase("logprobs"):
                self.add_logprobs(rollout.batch)
            disagreement = check_mismatch(
                step,
                rollout.batch,
                self.config.policy.generation.mismatch,
                self.config.loss_fn.reference_policy_kl_type,
            )
            self.add_advantages(rollout.batch)
            with self.observer.phase("train"):
                result = self.policy.train(rollout.batch, loss_fn)
            with self.observer.phase("weight_sync"):
                engine.update_weights(step)
            metrics = sampling_metrics | _rollout_metrics(rollout) | disagreement | _train_metrics(result)
            self.observer.add_samples(rollout.one_sample_a_prompt(step))
            last = step == grpo.max_num_steps
            if (grpo.val_period and step % grpo.val_period == 0) or (last and grpo.val_at_end):
                with self.observer.phase("validation"):
                    metrics |= self.validate(step)
            guard.record(result["skip_reasons"])
            counts = {"train/skipped_steps": guard.total, "train/empty_steps": guard.empty}
            self.observer.log(step, metrics | counts)
            guard.stop_if_too_many(step, rollout.batch)
            if self.checkpoints.due(step):
                with self.observer.phase("checkpoint"):  # counted in the step that follows
                    self.checkpoints.save(step, self.policy, metrics, guard.counters())

    def roll_out(self, step: int) -> tuple[Rollout, dict[str, float]]:
        """The step's answered and scored prompts; dynamic sampling replaces groups whose rewards are all equal.

        Raises RunStoppedError, naming the keys, when dynamic sampling does not fill the step.
        """
        grpo = self.config.grpo
        wanted = grpo.num_prompts_per_step
        if not grpo.use_dynamic_sampling:
            return self._sample(step, self.prompts.train_batch(step, wanted)), {}
        per_round = max(1, round(wanted * grpo.batch_multiplier))
        kept: list[Rollout] = []
        kept_rows = 0
        for generation_round in range(1, grpo.dynamic_sampling_max_gen_batches + 1):
            drawn = self.prompts.train_batch(step, per_round * generation_round)[-per_round:]
            rollout = self._sample(step, drawn)
            useful = rows_with_signal(rollout.batch["prompt_index"], rollout.batch["rewards"])
            kept.append(rollout.select([row for row in range(rollout.batch.size) if useful[row]]))
            kept_rows += kept[-1].batch.size
            if kept_rows >= grpo.samples_per_step:
                together = Rollout.concatenate(kept, self.collector.tokenizer.pad_token_id)
                share = kept_rows / (per_round * generation_round * grpo.num_generations_per_prompt)
                metrics = {
                    "train/dynamic_sampling_rounds": generation_round,
                    "train/dynamic_sampling_kept": share,
                }
                return together.select(range(grpo.samples_per_step)), metrics
        raise RunStoppedError(
            f"step {step}: {grpo.dynamic_sampling_max_gen_batches} generation rounds "
            f"(grpo.dynamic_sampling_max_gen_batches) gave {kept_rows // grpo.num_generations_per_prompt} groups with "
            f"unequal rewards, and grpo.num_prompts_per_step is {wanted}: raise grpo.num_generations_per_prompt or "
            "grpo.batch_multiplier, or set grpo.use_dynamic_sampling: false"
        )

    def _sample(self, step: int, prompts: Sequence[Any]) -> Rollout:
        """Answer the prompts and shape the rewards as the config says."""
        grpo = self.config.grpo
        rollout = self.collector.collect(prompts, grpo.num_generations_per_prompt, step=step)
        batch = rollout.batch
        # The unshaped reward is what the run reports.
        batch["environment_rewards"] = batch["rewards"].clone()
        if grpo.reward_scaling.enabled:
            scaling = grpo.reward_scaling
            batch["rewards"] = scale_rewards(
                batch["rewards"],
                source_min=scaling.source_min,
                source_max=scaling.source_max,
                target_min=scaling.target_min,
                target_max=scaling.target_max,
            )
        if grpo.reward_shaping.enabled and grpo.reward_shaping.max_response_length is not None:
            batch["rewards"] = penalize_overlong(
                batch["rewards"],
                batch["token_mask"].sum(1),
                overlong_buffer_length=grpo.reward_shaping.overlong_buffer_length,
                overlong_buffer_penalty=grpo.reward_shaping.overlong_buffer_penalty,
                max_response_length=grpo.reward_shaping.max_response_length,
            )
        if grpo.overlong_filtering:
            batch["sample_mask"] = batch["finished"].float()
        return rollout

    def add_logprobs(self, batch: BatchedDataDict) -> None:
        """Add prev_logprobs and, where a KL penalty needs them, reference_policy_logprobs."""
        inputs = BatchedDataDict({key: batch[key] for key in ("input_ids", "input_lengths")})
        batch["prev_logprobs"] = self.policy.get_logprobs(inputs)["logprobs"]
        if self.config.loss_fn.reference_policy_kl_penalty != 0:
            reference = self.policy.get_reference_policy_logprobs(inputs)
            batch["reference_policy_logprobs"] = reference["reference_logprobs"]

    def add_advantages(self, batch: BatchedDataDict) -> None:
        """Add advantages [B, S]."""
        estimator = make_advantage_estimator(self.config.grpo.adv_estimator, self.config.loss_fn)
        advantages = estimator.compute_advantage(
            prompt_ids=batch["prompt_index"],
            rewards=batch["rewards"],
            mask=batch["token_mask"] * batch["sample_mask"].unsqueeze(1),
            logprobs_policy=batch["prev_logprobs"],
            logprobs_reference=batch.get("reference_policy_logprobs"),
        )
        assert isinstance(advantages, torch.Tensor)  # the config refuses estimators with a critic
        batch["advantages"] = advantages

    def validate(self, step: int) -> dict[str, float]:
        """The greedy answers to the held-out prompts: mean reward and share of full marks."""
        prompts = self.prompts.validation(self.config.grpo.max_val_samples)
        size = self.config.grpo.val_batch_size
        rewards: list[float] = []
        for start in range(0, len(prompts), size):
            rollout = self.collector.collect(prompts[start : start + size], 1, step=step, greedy=True)
            self.observer.add_samples(rollout.one_sample_a_prompt(step))
            rewards += rollout.batch["rewards"].tolist()
        perfect = sum(reward >= 1.0 for reward in rewards) / len(rewards)
        return {"validation/reward": sum(rewards) / len(rewards), "validation/accuracy": perfect}


def _rollout_metrics(rollout: Rollout) -> dict[str, float]:
    batch = rollout.batch
    response_lengths = batch["token_mask"].sum(1)
    return {
        "train/reward": float(batch["environment_rewards"].mean()),
        "train/mean_prompt_length": float((batch["input_lengths"] - response_lengths).mean()),
        "train/mean_gen_tokens_per_sample": float(response_lengths.mean()),
        "train/truncation_rate": float((~batch["finished"]).float().mean()),
        "train/advantages_mean": float(
            (batch["advantages"] * batch["token_mask"]).sum() / response_lengths.sum()
        ),
        "train/groups_with_signal": float(
            rows_with_signal(batch["prompt_index"], batch["rewards"]).float().mean()
        ),
        "train/total_num_tokens": float(batch["input_lengths"].sum()),
    }


def _train_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """One number a metric for all optimizer steps of a rollout; the extrema of nothing are left out."""
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
    combined |= {"grad_norm": _mean(norms), "update_successful": float(result["update_successful"])}
    return {f"train/{name}": value for name, value in combined.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
