"""What every algorithm that learns from its own answers samples, and how it is judged on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_mcore.algorithms.loop import StepObserver
from nemo_rl_mcore.algorithms.rewards import penalize_overlong, rows_with_signal, scale_rewards
from nemo_rl_mcore.algorithms.rollout import Rollout, RolloutCollector
from nemo_rl_mcore.config import LoopConfig, RolloutConfig
from nemo_rl_mcore.data.datasets import PromptSource
from nemo_rl_mcore.errors import RunStoppedError


@dataclass(frozen=True)
class Evaluation:
    """How good the greedy answers to held-out prompts are."""

    loop: LoopConfig
    collector: RolloutCollector
    prompts: PromptSource
    observer: StepObserver

    def validate(self, step: int) -> dict[str, float]:
        """The greedy answers to the held-out prompts: mean reward and share of full marks."""
        prompts = self.prompts.validation(self.loop.max_val_samples)
        size = self.loop.val_batch_size
        rewards: list[float] = []
        for start in range(0, len(prompts), size):
            rollout = self.collector.collect(prompts[start : start + size], 1, step=step, greedy=True)
            self.observer.add_samples(rollout.one_sample_a_prompt(step))
            rewards += rollout.batch["rewards"].tolist()
        perfect = sum(reward >= 1.0 for reward in rewards) / len(rewards)
        return {"validation/reward": sum(rewards) / len(rewards), "validation/accuracy": perfect}


@dataclass(frozen=True)
class Sampling:
    """Answered and scored prompts, as the algorithm's section asks; `name` is that of the section."""

    name: str
    loop: RolloutConfig
    collector: RolloutCollector
    prompts: PromptSource

    def roll_out(self, step: int) -> tuple[Rollout, dict[str, float]]:
        """The step's answered and scored prompts; the engine then makes room for training.

        Dynamic sampling replaces groups whose rewards are all equal. Raises RunStoppedError, naming the keys, when
        it does not fill the step.
        """
        if self.loop.use_dynamic_sampling:
            rollout, metrics = self._fill(step)
        else:
            prompts = self.prompts.train_batch(step, self.loop.num_prompts_per_step)
            rollout, metrics = self._sample(step, prompts), dict[str, float]()
        self.collector.generation.offload()
        return rollout, metrics

    def _fill(self, step: int) -> tuple[Rollout, dict[str, float]]:
        """Groups with unequal rewards, from as many rounds as it takes."""
        loop = self.loop
        wanted = loop.num_prompts_per_step
        per_round = max(1, round(wanted * loop.batch_multiplier))
        kept: list[Rollout] = []
        kept_rows = 0
        for generation_round in range(1, loop.dynamic_sampling_max_gen_batches + 1):
            drawn = self.prompts.train_batch(step, per_round * generation_round)[-per_round:]
            rollout = self._sample(step, drawn)
            useful = rows_with_signal(rollout.batch["prompt_index"], rollout.batch["rewards"])
            kept.append(rollout.select([row for row in range(rollout.batch.size) if useful[row]]))
            kept_rows += kept[-1].batch.size
            if kept_rows >= loop.samples_per_step:
                together = Rollout.concatenate(kept, self.collector.tokenizer.pad_token_id)
                share = kept_rows / (per_round * generation_round * loop.num_generations_per_prompt)
                metrics = {
                    "train/dynamic_sampling_rounds": generation_round,
                    "train/dynamic_sampling_kept": share,
                }
                return together.select(range(loop.samples_per_step)), metrics
        name = self.name
        raise RunStoppedError(
            f"step {step}: {loop.dynamic_sampling_max_gen_batches} generation rounds "
            f"({name}.dynamic_sampling_max_gen_batches) gave {kept_rows // loop.num_generations_per_prompt} groups "
            f"with unequal rewards, and {name}.num_prompts_per_step is {wanted}: raise "
            f"{name}.num_generations_per_prompt or {name}.batch_multiplier, or set {name}.use_dynamic_sampling: false"
        )

    def _sample(self, step: int, prompts: Sequence[Any]) -> Rollout:
        """Answer the prompts and shape the rewards as the config says."""
        loop = self.loop
        rollout = self.collector.collect(prompts, loop.num_generations_per_prompt, step=step)
        batch = rollout.batch
        # The unshaped reward is what the run reports.
        batch["environment_rewards"] = batch["rewards"].clone()
        if loop.reward_scaling.enabled:
            scaling = loop.reward_scaling
            batch["rewards"] = scale_rewards(
                batch["rewards"],
                source_min=scaling.source_min,
                source_max=scaling.source_max,
                target_min=scaling.target_min,
                target_max=scaling.target_max,
            )
        if loop.reward_shaping.enabled and loop.reward_shaping.max_response_length is not None:
            batch["rewards"] = penalize_overlong(
                batch["rewards"],
                batch["token_mask"].sum(1),
                overlong_buffer_length=loop.reward_shaping.overlong_buffer_length,
                overlong_buffer_penalty=loop.reward_shaping.overlong_buffer_penalty,
                max_response_length=loop.reward_shaping.max_response_length,
            )
        if loop.overlong_filtering:
            batch["sample_mask"] = batch["finished"].float()
        return rollout
