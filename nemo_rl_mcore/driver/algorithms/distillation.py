"""Distillation: a student learns how probable its teacher finds each token.

On policy the answers are the student's own (https://arxiv.org/abs/2306.13649), off policy those of the data set.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_mcore.config import DistillationMasterConfig
from nemo_rl_mcore.data.answers import given_answers
from nemo_rl_mcore.driver.algorithms.advantages import estimator_of, warn_of_large_advantages
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, Judged, StepOutcome
from nemo_rl_mcore.driver.algorithms.mismatch import add_logprobs, trained_inputs
from nemo_rl_mcore.driver.algorithms.step_metrics import train_metrics
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.driver.rollouts.scheduler import Step
from nemo_rl_mcore.driver.rollouts.transcript import require_sampled_ids, trained_columns
from nemo_rl_mcore.losses import make_loss


@dataclass(frozen=True)
class DistillationTrainer(Algorithm[DistillationMasterConfig]):
    """A student and its teacher, which is never trained."""

    teacher: Policy

    def judge(self, step: Step) -> Judged:
        """Take answers, and ask the teacher."""
        rollout, section = None, self.config.distillation
        if self.config.generations_per_prompt:
            rollout = self._sampled(step)
            batch = rollout.batch
        else:
            prompts = self.prompts.train_batch(step.number, section.num_prompts_per_step)
            batch = given_answers(prompts, self.collector.tokenizer)
        with self.observer.phase("teacher"):
            k = section.topk_logits_k or self.config.policy.model.vocab_size
            said = self.teacher.get_topk_logits(trained_inputs(batch), k, trained_only=True)
            for name, value in said.items():
                batch[f"teacher_{name}"] = value
        require_sampled_ids(batch)
        return Judged(batch, rollout)

    def _sampled(self, step: Step) -> Rollout:
        """Return the student's answers; with what the policy gradient needs, where there is one."""
        with self.observer.phase("generation"):
            rollout = step.whole()
        if self.config.loss_fn.rl_weight:
            with self.observer.phase("logprobs"):
                add_logprobs(rollout.batch, self.policy, self.config.loss_fn.rl)
            estimator_of(self.config, self.config.loss_fn.rl).add_to(rollout.batch)
            warn_of_large_advantages(step.number, rollout)
        return rollout

    def update(self, step: Step, judged: Judged) -> StepOutcome:
        """Train the student."""
        batch = judged.batch
        with self.training(step.number, judged.rollout) as metrics:
            result = self.policy.train(trained_columns(batch), make_loss(self.config.loss_fn))
        metrics |= step.finish()
        metrics["train/total_num_tokens"] = float(batch["input_lengths"].sum())
        return StepOutcome(metrics | train_metrics(result), result["skip_reasons"], batch)
