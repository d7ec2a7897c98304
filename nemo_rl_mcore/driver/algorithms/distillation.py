"""Distillation: a student learns how probable its teacher finds each token.

On policy the answers are the student's own (https://arxiv.org/abs/2306.13649), off policy those of the data set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nemo_rl_mcore.config import DistillationMasterConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.answers import given_answers
from nemo_rl_mcore.driver.algorithms.advantages import warn_of_large_advantages
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, StepOutcome
from nemo_rl_mcore.driver.algorithms.custom_estimator import estimator_of
from nemo_rl_mcore.driver.algorithms.logprobs import add_logprobs, trained_inputs
from nemo_rl_mcore.driver.algorithms.step_metrics import train_metrics
from nemo_rl_mcore.driver.interfaces import PolicyInterface
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.driver.rollouts.sampled_ids import require_sampled_ids
from nemo_rl_mcore.driver.rollouts.steps import StepGroups
from nemo_rl_mcore.driver.rollouts.transcript import trained_columns
from nemo_rl_mcore.losses import make_loss


@dataclass(frozen=True)
class Distillation(Algorithm[DistillationMasterConfig]):
    """A student and its teacher, which is never trained."""

    teacher: PolicyInterface

    def train(self, step: int, groups: StepGroups | None, begin_update: Callable[[], None]) -> StepOutcome:
        """Take answers, ask the teacher, train."""
        rollout = None if groups is None else self._sampled(step, groups)
        batch = self._given(step) if rollout is None else rollout.batch
        with self.observer.phase("teacher"):
            self._add_teacher(batch)
        require_sampled_ids(batch)
        begin_update()
        with self.training(step, rollout) as metrics:
            result = self.policy.train(trained_columns(batch), make_loss(self.config.loss_fn))
        if groups is not None:
            metrics |= groups.finish()
        metrics["train/total_num_tokens"] = float(batch["input_lengths"].sum())
        return StepOutcome(metrics | train_metrics(result), result["skip_reasons"], batch)

    def _sampled(self, step: int, groups: StepGroups) -> Rollout:
        """Return the student's answers; with what the policy gradient needs, where there is one."""
        with self.observer.phase("generation"):
            rollout = groups.whole()
        if self.config.loss_fn.rl_weight:
            with self.observer.phase("logprobs"):
                add_logprobs(rollout.batch, self.policy, self.config.loss_fn.rl)
            estimator_of(self.config, self.config.loss_fn.rl).add_to(rollout.batch)
            warn_of_large_advantages(step, rollout)
        return rollout

    def _given(self, step: int) -> BatchedDataDict:
        prompts = self.prompts.train_batch(step, self.config.distillation.num_prompts_per_step)
        return given_answers(prompts, self.collector.tokenizer)

    def _add_teacher(self, batch: BatchedDataDict) -> None:
        k = self.config.distillation.topk_logits_k or self.config.policy.model.vocab_size
        said = self.teacher.get_topk_logits(trained_inputs(batch), k, trained_only=True)
        for name, value in said.items():
            batch[f"teacher_{name}"] = value
