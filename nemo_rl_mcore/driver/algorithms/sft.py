"""Supervised fine-tuning: imitate the given answers."""

from __future__ import annotations

from functools import cached_property

from nemo_rl_mcore.config import SFTMasterConfig
from nemo_rl_mcore.data.answers import given_answers
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, Judged, StepOutcome, train_metrics
from nemo_rl_mcore.driver.rollouts.scheduler import Step
from nemo_rl_mcore.losses import LossFunction, make_loss


class SFTTrainer(Algorithm[SFTMasterConfig]):
    def judge(self, step: Step) -> Judged:
        prompts = self.prompts.train_batch(step.number, self.config.policy.train_global_batch_size)
        return Judged(given_answers(prompts, self.collector.tokenizer))

    def update(self, step: Step, judged: Judged) -> StepOutcome:
        batch = judged.batch
        with self.observer.phase("train"):
            result = self.policy.train(batch, self._loss_fn)
        tokens = {"train/total_num_tokens": float(batch["input_lengths"].sum())}
        return StepOutcome(train_metrics(result) | tokens, result["skip_reasons"], batch)

    def validate(self, step: int) -> dict[str, float]:
        judged = super().validate(step)
        found = self.evaluate(
            self.config.sft, self._loss_fn, lambda prompts: given_answers(prompts, self.collector.tokenizer)
        )
        return {"validation/loss": found["validation/loss"], **judged}

    @cached_property
    def _loss_fn(self) -> LossFunction:
        return make_loss(self.config.loss_fn, self.config.policy.megatron_cfg.use_fused_linear_logprobs)
