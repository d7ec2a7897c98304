"""Direct preference optimization: of two answers to a prompt, move towards the better one.

Offline the pairs are given; online the policy answers each prompt several times, and its best answer is compared with
its worst. P pairs are 2 P rows: chosen, rejected, chosen, ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from nemo_rl_mcore.config import DPOMasterConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import EPISODE
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.preference import PreferenceSource
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, StepOutcome
from nemo_rl_mcore.driver.algorithms.logprobs import trained_inputs
from nemo_rl_mcore.driver.algorithms.reference_blocks import ReferenceBlocks
from nemo_rl_mcore.driver.algorithms.step_metrics import train_metrics
from nemo_rl_mcore.driver.rollouts.episode_rows import uncounted_rows
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.driver.rollouts.sampled_ids import require_sampled_ids
from nemo_rl_mcore.driver.rollouts.steps import StepGroups
from nemo_rl_mcore.driver.rollouts.transcript import trained_columns
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.losses import DPOLossFn

_ROWS_PER_PAIR = DPOLossFn.rows_per_sample


@dataclass(frozen=True)
class DPO(Algorithm[DPOMasterConfig]):
    """Direct preference optimization, https://arxiv.org/abs/2305.18290. `pairs` is None where they are made online."""

    pairs: PreferenceSource | None

    def train(self, step: int, groups: StepGroups | None, begin_update: Callable[[], None]) -> StepOutcome:
        """Make pairs of the groups, or take those of the data set, and train on them."""
        rollout, paired = None, dict[str, float]()
        if groups is not None:
            with self.observer.phase("generation"):
                rollout = groups.whole()
            batch, with_signal = best_against_worst(rollout, self.config.dpo.num_generations_per_prompt or 0)
            paired["train/pairs_with_signal"] = with_signal
        else:
            assert self.pairs is not None
            batch = self.pairs.train_batch(step, self.config.policy.train_global_batch_size)
        with self.observer.phase("reference"):
            known = self._reference
            _add_reference(batch, known.of_step(step, batch) if known else self._ask_reference(batch))
        require_sampled_ids(batch)
        begin_update()
        with self.training(step, rollout) as metrics:
            result = self.policy.train(trained_columns(batch), self._loss_fn)
        metrics |= paired
        if groups is not None:
            metrics |= groups.finish()
        metrics["train/total_num_tokens"] = float(batch["input_lengths"].sum())
        trained = train_metrics(result)
        trained |= preference_metrics(trained, "train")
        return StepOutcome(trained | metrics, result["skip_reasons"], batch)

    def validate(self, step: int) -> dict[str, float]:
        """Return the loss of held-out pairs, where pairs are given, and how good the policy's answers are."""
        judged = super().validate(step)
        pairs, reference = self.pairs, self._reference
        if pairs is None or reference is None:
            return judged

        def compared(prompts: Sequence[Prompt]) -> BatchedDataDict:
            batch = pairs.rows(prompts)
            _add_reference(batch, reference.of_validation(batch))
            return trained_columns(batch)

        held_out = self.evaluate(self.config.dpo, self._loss_fn, compared)
        return (
            judged
            | {"validation/loss": held_out["validation/loss"]}
            | preference_metrics(held_out, "validation")
        )

    @property
    def _loss_fn(self) -> DPOLossFn:
        fused = self.config.policy.megatron_cfg.use_fused_linear_logprobs
        return DPOLossFn(self.config.dpo.loss, fused)

    @cached_property
    def _reference(self) -> ReferenceBlocks | None:
        """Return that of given pairs."""
        if self.pairs is None:
            return None
        policy = self.config.policy
        count, longest = policy.train_global_batch_size, policy.max_total_sequence_length
        return ReferenceBlocks(self.pairs, self._ask_reference, count, longest)

    def _ask_reference(self, batch: BatchedDataDict) -> torch.Tensor:
        return self.policy.get_reference_policy_logprobs(trained_inputs(batch), trained_only=True)[
            "reference_logprobs"
        ]


def _add_reference(batch: BatchedDataDict, logprobs: torch.Tensor) -> None:
    # DPO's convention: column i is log p of token i + 1.
    batch["reference_policy_logprobs"] = logprobs.roll(-1, dims=1)


def preference_metrics(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Measure what pairs show, under names that say so: `accuracy` elsewhere is that of answers.

    preference_accuracy: the share of pairs whose chosen answer has the higher reward. rewards_chosen_mean,
    rewards_rejected_mean, and rewards_margin_mean, their difference: log-probability less the reference's.
    """
    chosen, rejected = (metrics[f"{prefix}/rewards_{side}_mean"] for side in ("chosen", "rejected"))
    return {
        f"{prefix}/preference_accuracy": metrics[f"{prefix}/accuracy"],
        f"{prefix}/rewards_chosen_mean": chosen,
        f"{prefix}/rewards_rejected_mean": rejected,
        f"{prefix}/rewards_margin_mean": chosen - rejected,
    }


def best_against_worst(rollout: Rollout, answers: int) -> tuple[BatchedDataDict, float]:
    """Return a pair of each prompt's best and worst answer, and the share of the pairs whose rewards differ.

    A pair of equal rewards has no preference: its sample_mask is 0. The rollout's mask is then 1 on the answers
    that are in a pair which counts. An answer that was dropped or not scored is neither best nor worst.
    Raises ValueError for answers of several rows.
    """
    if EPISODE in rollout.batch:
        raise RefusedError(
            f"{EPISODE}: a pair compares rows, and the episodes of this rollout may have several",
            code="rows-per-episode",
        )
    uncounted_PA = uncounted_rows(rollout.batch).view(-1, answers)
    rewards_PA = rollout.batch["rewards"].view(-1, answers)
    best_P, chosen_P = rewards_PA.masked_fill(uncounted_PA, -torch.inf).max(1)
    worst_P, rejected_P = rewards_PA.masked_fill(uncounted_PA, torch.inf).min(1)
    first_row_P = torch.arange(len(rewards_PA)) * answers
    rows_P2 = torch.stack([first_row_P + chosen_P, first_row_P + rejected_P], dim=1)
    batch = rollout.batch.select_indices(rows_P2.flatten())
    differs_P = best_P > worst_P
    batch["sample_mask"] = differs_P.float().repeat_interleave(_ROWS_PER_PAIR)
    trained = torch.zeros(rollout.batch.size).scatter(0, rows_P2.flatten(), batch["sample_mask"])
    rollout.batch["sample_mask"] = trained
    return batch, float(differs_P.float().mean())
