"""Supervised fine-tuning: imitate the given answers."""

from __future__ import annotations

from functools import cached_property

from nemo_rl_mcore.config import SFTMasterConfig
from nemo_rl_mcore.data.answers import given_answers
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, Judged
from nemo_rl_mcore.driver.rollouts.scheduler import Step
from nemo_rl_mcore.losses import LossFunction, make_loss


class SFTTrainer(Algorithm[SFTMasterConfig]):
    def judge(self, step: Step) -> Judged:
        prompts = self.prompts.train_batch(step.number, self.config.policy.train_global_batch_size)
        return Judged(given_answers(prompts, self.collector.tokenizer))

    def validate(self, step: int) -> dict[str, float]:
        judged, tokenizer = super().validate(step), self.collector.tokenizer
        found = self.evaluate(self.config.sft, lambda prompts: given_answers(prompts, tokenizer))
        return {"validation/loss": found["validation/loss"], **judged}

    @cached_property
    def loss_fn(self) -> LossFunction:
        return make_loss(self.config.loss_fn, self.config.policy.megatron_cfg.use_fused_linear_logprobs)
