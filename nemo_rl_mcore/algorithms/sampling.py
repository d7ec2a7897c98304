"""What an algorithm that learns from its own answers samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_rl_mcore.algorithms.algorithm import Algorithm
from nemo_rl_mcore.algorithms.episode_rows import EpisodeRows
from nemo_rl_mcore.algorithms.rewards import penalize_overlong, rows_with_signal, scale_rewards
from nemo_rl_mcore.algorithms.rollout import Rollout
from nemo_rl_mcore.config import RolloutConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.errors import RunStoppedError


@dataclass(frozen=True)
class Sampling:
    """Answered and scored prompts, as the algorithm's section asks."""

    algorithm: Algorithm[Any]
    section: RolloutConfig

    def roll_out(self, step: int) -> tuple[Rollout, dict[str, float]]:
        """The step's answered and scored prompts, and what the environments went through; the engine then sleeps.

        Dynamic sampling replaces groups whose rewards are all equal. Raises RunStoppedError, naming the keys, when
        it does not fill the step.
        """
        if self.section.use_dynamic_sampling:
            rollout, metrics = self._fill(step)
        else:
            prompts = self.algorithm.prompts.train_batch(step, self.section.num_prompts_per_step)
            rollout, metrics = self._sample(step, prompts), dict[str, float]()
        collector = self.algorithm.collector
        collector.generation.offload()
        return rollout, metrics | dict(collector.environments.take_counts())

    def _fill(self, step: int) -> tuple[Rollout, dict[str, float]]:
        """Groups with unequal rewards, from as many rounds as it takes."""
        section = self.section
        wanted = section.num_prompts_per_step
        per_round = max(1, round(wanted * section.batch_multiplier))
        kept: list[Rollout] = []
        kept_samples = 0
        for generation_round in range(1, section.dynamic_sampling_max_gen_batches + 1):
            drawn = self.algorithm.prompts.train_batch(step, per_round * generation_round)[-per_round:]
            rollout = self._sample(step, drawn)
            useful = _useful_rows(rollout.batch)
            kept.append(rollout.select([row for row in range(rollout.batch.size) if useful[row]]))
            dropped = rollout.select([row for row in range(rollout.batch.size) if not useful[row]])
            self._note_dropped(step, dropped)
            kept_samples += len(kept[-1].batch.samples())
            if kept_samples >= section.samples_per_step:
                together = Rollout.concatenate(kept, self.algorithm.collector.tokenizer.pad_token_id)
                share = kept_samples / (per_round * generation_round * section.num_generations_per_prompt)
                metrics = {
                    "train/dynamic_sampling_rounds": generation_round,
                    "train/dynamic_sampling_kept": share,
                }
                end = together.batch.samples()[section.samples_per_step - 1].stop
                self._note_dropped(step, together.select(range(end, together.batch.size)))
                return together.select(range(end)), metrics
        name, groups = self.algorithm.config.algorithm, kept_samples // section.num_generations_per_prompt
        raise RunStoppedError(
            f"step {step}: {section.dynamic_sampling_max_gen_batches} generation rounds "
            f"({name}.dynamic_sampling_max_gen_batches) gave {groups} groups "
            f"with unequal rewards, and {name}.num_prompts_per_step is {wanted}: raise "
            f"{name}.num_generations_per_prompt or {name}.batch_multiplier, or set {name}.use_dynamic_sampling: false",
            code="too-few-groups",
        )

    def _note_dropped(self, step: int, rollout: Rollout) -> None:
        """Have answers written down that nothing is trained on."""
        rollout.batch["sample_mask"] = torch.zeros(rollout.batch.size)
        self.algorithm.record(step, rollout, trained=False)

    def _sample(self, step: int, prompts: Sequence[Any]) -> Rollout:
        """Answer the prompts and shape the rewards."""
        rollout = self.algorithm.collector.collect(
            prompts, self.section.num_generations_per_prompt, step=step
        )
        self.shape(rollout)
        return rollout

    def shape(self, rollout: Rollout) -> None:
        """Shape the rewards of scored answers as the config says."""
        section, batch = self.section, rollout.batch
        episodes = EpisodeRows.of(batch)
        # The unshaped reward is what the run reports.
        batch["environment_rewards"] = batch["rewards"].clone()
        if section.reward_scaling.enabled:
            scaling = section.reward_scaling
            batch["rewards"] = scale_rewards(
                batch["rewards"],
                source_min=scaling.source_min,
                source_max=scaling.source_max,
                target_min=scaling.target_min,
                target_max=scaling.target_max,
            )
        if section.reward_shaping.enabled and section.reward_shaping.max_response_length is not None:
            batch["rewards"] = penalize_overlong(
                batch["rewards"],
                episodes.on_rows(episodes.total(batch["token_mask"].sum(1))),
                overlong_buffer_length=section.reward_shaping.overlong_buffer_length,
                overlong_buffer_penalty=section.reward_shaping.overlong_buffer_penalty,
                max_response_length=section.reward_shaping.max_response_length,
            )
        if section.overlong_filtering:
            batch["sample_mask"] = batch["sample_mask"] * batch["finished"]


def _useful_rows(batch: BatchedDataDict) -> torch.Tensor:
    """Bool [B]: the rows of groups that can be compared, in which dropped episodes stay but do not count."""
    counted = torch.zeros(batch.size, dtype=torch.bool)
    counted[EpisodeRows.of(batch).first] = True
    return rows_with_signal(batch["prompt_index"], batch["rewards"], counted)
