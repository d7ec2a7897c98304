"""GRPO: answer prompts, score the answers, compare them within their group, train.

No Ray and no Megatron here: the policy and the engine come in behind `interfaces`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from nemo_rl_mcore.algorithms.advantages import make_advantage_estimator, warn_of_large_advantages
from nemo_rl_mcore.algorithms.algorithm import Algorithm, StepOutcome
from nemo_rl_mcore.algorithms.episodes import trained_columns
from nemo_rl_mcore.algorithms.logprobs import add_logprobs, policy_loss
from nemo_rl_mcore.algorithms.mismatch import check_mismatch, mismatch_of_training, responses
from nemo_rl_mcore.algorithms.rollout import Rollout
from nemo_rl_mcore.algorithms.sampled_ids import require_sampled_ids
from nemo_rl_mcore.algorithms.sampling import Sampling
from nemo_rl_mcore.algorithms.step_metrics import rollout_metrics, train_metrics
from nemo_rl_mcore.config import GRPOMasterConfig
from nemo_rl_mcore.config.prev_logprobs import reader_of_prev_logprobs
from nemo_rl_mcore.config.vllm import MismatchConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import LossFunction
from nemo_rl_mcore.losses.sampler_check import SamplerSums


class GRPO(Algorithm[GRPOMasterConfig]):
    """Group relative policy optimization, https://arxiv.org/abs/2402.03300."""

    def step(self, step: int, begin_update: Callable[[], None]) -> StepOutcome:
        """Sample, judge, train."""
        with self.observer.phase("generation"):
            rollout, metrics = Sampling(self, self.config.grpo).roll_out(step)
        metrics |= self._judge(step, rollout)
        begin_update()
        with self.observer.phase("train"):
            result = self.policy.train(trained_columns(rollout.batch), self._loss_fn)
        self.record(step, rollout)
        if not self._passes_before:
            sums = SamplerSums.taken_from(result)
            metrics |= mismatch_of_training(step, sums, responses(rollout.batch), self._mismatch)
        metrics |= rollout_metrics(rollout) | train_metrics(result)
        return StepOutcome(metrics, result["skip_reasons"], rollout.batch)

    def _judge(self, step: int, rollout: Rollout) -> dict[str, float]:
        """Add to whole groups what the loss needs besides the answers: log-probabilities and advantages."""
        loss, batch = self.config.loss_fn, rollout.batch
        with self.observer.phase("logprobs"):
            add_logprobs(batch, self.policy, loss, previous=self._passes_before)
        metrics = self._check_mismatch(step, batch) if self._passes_before else {}
        make_advantage_estimator(self.config.grpo.adv_estimator, loss).add_to(batch)
        warn_of_large_advantages(step, rollout)
        require_sampled_ids(batch)
        return metrics

    def _check_mismatch(self, step: int, batch: BatchedDataDict) -> dict[str, float]:
        return check_mismatch(step, batch, self._mismatch, self.config.loss_fn.reference_policy_kl_type)

    @property
    def _mismatch(self) -> MismatchConfig:
        return self.config.policy.generation.mismatch

    @cached_property
    def _passes_before(self) -> bool:
        """Whether a pass before training gives prev_logprobs."""
        return reader_of_prev_logprobs(self.config) is not None

    @cached_property
    def _loss_fn(self) -> LossFunction:
        return policy_loss(self.config)
