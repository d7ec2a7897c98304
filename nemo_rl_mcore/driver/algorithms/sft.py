"""Supervised fine-tuning: imitate the given answers."""

from __future__ import annotations

from nemo_rl_mcore.config import SFTMasterConfig
from nemo_rl_mcore.data.answers import given_answers
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, Judged
from nemo_rl_mcore.driver.rollouts.scheduler import Step


class SFTTrainer(Algorithm[SFTMasterConfig]):
    def judge(self, step: Step) -> Judged:
        prompts = self.prompts.train_batch(step.number, self.config.policy.train_global_batch_size)
        return Judged(given_answers(prompts, self.collector.tokenizer))

    def validate(self, step: int) -> dict[str, float]:
        judged, tokenizer = super().validate(step), self.collector.tokenizer
        found = self.evaluate(self.config.sft, lambda prompts: given_answers(prompts, tokenizer))
        return {"validation/loss": found["validation/loss"], **judged}
