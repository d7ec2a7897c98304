"""Distillation: a student learns the probabilities that its teacher assigns to each token.

The answers are the student's own (on policy, https://arxiv.org/abs/2306.13649) or the data set's (off policy).
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_mcore.config import DistillationMasterConfig
from nemo_rl_mcore.data.answers import given_answers
from nemo_rl_mcore.driver.algorithms.advantages import estimator_of, warn_of_large_advantages
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, Judged
from nemo_rl_mcore.driver.algorithms.mismatch import add_logprobs, model_inputs
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.rollouts.scheduler import Step
from nemo_rl_mcore.driver.rollouts.transcript import require_sampled_ids


@dataclass(frozen=True)
class DistillationTrainer(Algorithm[DistillationMasterConfig]):
    teacher: Policy

    def judge(self, step: Step) -> Judged:
        rollout, section, loss = None, self.config.distillation, self.config.loss_fn
        if self.config.generations_per_prompt:
            with self.observer.phase("generation"):
                rollout = step.whole()
            batch = rollout.batch
            if loss.rl_weight:
                with self.observer.phase("logprobs"):
                    add_logprobs(batch, self.policy, loss.rl)
                estimator_of(self.config, loss.rl).add_to(batch)
                warn_of_large_advantages(step.number, rollout)
        else:
            prompts = self.prompts.train_batch(step.number, section.num_prompts_per_step)
            batch = given_answers(prompts, self.collector.tokenizer)
        with self.observer.phase("teacher"):
            k = section.topk_logits_k or self.config.policy.model.vocab_size
            inputs = model_inputs(batch, "token_mask")
            for name, value in self.teacher.get_topk_logits(inputs, k, trained_only=True).items():
                batch[f"teacher_{name}"] = value
        require_sampled_ids(batch)
        return Judged(batch, rollout)
