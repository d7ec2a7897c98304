"""Supervised fine-tuning: imitate the given answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from nemo_rl_mcore.algorithms.loop import StepObserver, StepOutcome, TrainingLoop
from nemo_rl_mcore.algorithms.rollout import RolloutCollector
from nemo_rl_mcore.algorithms.run_checkpoints import RunCheckpoints
from nemo_rl_mcore.algorithms.sampling import Evaluation
from nemo_rl_mcore.algorithms.step_metrics import train_metrics
from nemo_rl_mcore.config import SFTMasterConfig
from nemo_rl_mcore.data.answers import given_answers
from nemo_rl_mcore.data.datasets import PromptSource
from nemo_rl_mcore.interfaces import PolicyInterface
from nemo_rl_mcore.losses import LossFunction, make_loss


@dataclass(frozen=True)
class SFT:
    """A run of supervised fine-tuning over its parts; `step` is the algorithm."""

    config: SFTMasterConfig
    policy: PolicyInterface
    collector: RolloutCollector
    prompts: PromptSource
    observer: StepObserver
    checkpoints: RunCheckpoints = field(default_factory=RunCheckpoints)

    def run(self) -> None:
        """See `TrainingLoop.run`."""
        models = {"policy": self.policy}
        engine = self.collector.generation
        TrainingLoop(self.config, models, engine, self.observer, self.checkpoints).run(self)

    def step(self, step: int) -> StepOutcome:
        """Train on the step's answers."""
        prompts = self.prompts.train_batch(step, self.config.policy.train_global_batch_size)
        batch = given_answers(prompts, self.collector.tokenizer)
        with self.observer.phase("train"):
            result = self.policy.train(batch, self._loss_fn)
        tokens = {"train/total_num_tokens": float(batch["input_lengths"].sum())}
        return StepOutcome(train_metrics(result) | tokens, result["skip_reasons"], batch)

    def validate(self, step: int) -> dict[str, float]:
        """The loss of held-out answers, and how good the policy's own answers to their prompts are."""
        size = self.config.policy.train_global_batch_size
        held_out = self.prompts.validation(self.config.sft.val_batches * size)
        batch = given_answers(held_out, self.collector.tokenizer)
        result = self.policy.train(batch, self._loss_fn, eval_mode=True)
        loss = train_metrics(result, "validation")["validation/loss"]
        judged = Evaluation(self.config.sft, self.collector, self.prompts, self.observer).validate(step)
        return {"validation/loss": loss, **judged}

    @cached_property
    def _loss_fn(self) -> LossFunction:
        return make_loss(self.config.loss_fn, self.config.policy.megatron_cfg.use_fused_linear_logprobs)
