"""GRPO: answer prompts, score the answers, compare them within their group, train.

No Ray and no Megatron here: the policy and the engine come in behind `interfaces`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from nemo_rl_mcore.algorithms.advantages import make_advantage_estimator
from nemo_rl_mcore.algorithms.large_advantages import warn_of_large_advantages
from nemo_rl_mcore.algorithms.loop import StepObserver, StepOutcome, TrainingLoop
from nemo_rl_mcore.algorithms.mismatch import check_mismatch
from nemo_rl_mcore.algorithms.rollout import RolloutCollector
from nemo_rl_mcore.algorithms.run_checkpoints import RunCheckpoints
from nemo_rl_mcore.algorithms.sampling import Evaluation, Sampling
from nemo_rl_mcore.algorithms.step_metrics import rollout_metrics, train_metrics
from nemo_rl_mcore.config import AdvantageEstimatorConfig, ClippedPGLossConfig, GRPOMasterConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import PromptSource
from nemo_rl_mcore.interfaces import PolicyInterface
from nemo_rl_mcore.losses import LossFunction, make_loss


@dataclass(frozen=True)
class GRPO:
    """A GRPO run over its parts; `step` is the algorithm."""

    config: GRPOMasterConfig
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
        """Sample, judge, train."""
        with self.observer.phase("generation"):
            rollout, metrics = self._sampling.roll_out(step)
        batch = rollout.batch
        with self.observer.phase("logprobs"):
            add_logprobs(batch, self.policy, self.config.loss_fn)
        metrics |= check_mismatch(
            step, batch, self.config.policy.generation.mismatch, self.config.loss_fn.reference_policy_kl_type
        )
        add_group_advantages(batch, self.config.grpo.adv_estimator, self.config.loss_fn)
        warn_of_large_advantages(step, rollout)
        with self.observer.phase("train"):
            result = self.policy.train(batch, self._loss_fn)
        self.observer.add_samples(rollout.one_sample_a_prompt(step))
        metrics |= rollout_metrics(rollout) | train_metrics(result)
        return StepOutcome(metrics, result["skip_reasons"], batch)

    def validate(self, step: int) -> dict[str, float]:
        """See `Evaluation.validate`."""
        return Evaluation(self.config.grpo, self.collector, self.prompts, self.observer).validate(step)

    @cached_property
    def _sampling(self) -> Sampling:
        return Sampling("grpo", self.config.grpo, self.collector, self.prompts)

    @cached_property
    def _loss_fn(self) -> LossFunction:
        return make_loss(self.config.loss_fn, self.config.policy.megatron_cfg.use_fused_linear_logprobs)


def add_logprobs(batch: BatchedDataDict, policy: PolicyInterface, loss: ClippedPGLossConfig) -> None:
    """Add prev_logprobs and, where a KL penalty needs them, reference_policy_logprobs."""
    inputs = model_inputs(batch)
    batch["prev_logprobs"] = policy.get_logprobs(inputs)["logprobs"]
    if loss.reference_policy_kl_penalty != 0:
        reference = policy.get_reference_policy_logprobs(inputs)
        batch["reference_policy_logprobs"] = reference["reference_logprobs"]


def add_group_advantages(
    batch: BatchedDataDict, config: AdvantageEstimatorConfig, loss: ClippedPGLossConfig
) -> None:
    """Add advantages [B, S] by an estimator that compares the answers to a prompt."""
    advantages = make_advantage_estimator(config, loss).compute_advantage(
        prompt_ids=batch["prompt_index"],
        rewards=batch["rewards"],
        mask=batch["token_mask"] * batch["sample_mask"].unsqueeze(1),
        logprobs_policy=batch["prev_logprobs"],
        logprobs_reference=batch.get("reference_policy_logprobs"),
    )
    assert isinstance(advantages, torch.Tensor)  # the config refuses estimators with a critic
    batch["advantages"] = advantages


def model_inputs(batch: BatchedDataDict) -> BatchedDataDict:
    """What a pass without a loss needs of a batch."""
    return BatchedDataDict({key: batch[key] for key in ("input_ids", "input_lengths")})
