"""GRPO: answer prompts, score the answers, compare them within their group, train.

No Ray and no Megatron here: the policy and the engine come in behind `interfaces`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from nemo_rl_mcore.algorithms.advantages import make_advantage_estimator
from nemo_rl_mcore.algorithms.algorithm import Algorithm, StepOutcome
from nemo_rl_mcore.algorithms.large_advantages import warn_of_large_advantages
from nemo_rl_mcore.algorithms.logprobs import add_logprobs
from nemo_rl_mcore.algorithms.mismatch import check_mismatch
from nemo_rl_mcore.algorithms.sampling import Sampling
from nemo_rl_mcore.algorithms.step_metrics import rollout_metrics, train_metrics
from nemo_rl_mcore.config import GRPOMasterConfig
from nemo_rl_mcore.losses import LossFunction, make_loss


class GRPO(Algorithm[GRPOMasterConfig]):
    """Group relative policy optimization, https://arxiv.org/abs/2402.03300."""

    def step(self, step: int, begin_update: Callable[[], None]) -> StepOutcome:
        """Sample, judge, train."""
        config, loss = self.config, self.config.loss_fn
        with self.observer.phase("generation"):
            rollout, metrics = Sampling(self, config.grpo).roll_out(step)
        batch = rollout.batch
        with self.observer.phase("logprobs"):
            add_logprobs(batch, self.policy, loss)
        mismatch = config.policy.generation.mismatch
        metrics |= check_mismatch(step, batch, mismatch, loss.reference_policy_kl_type)
        make_advantage_estimator(config.grpo.adv_estimator, loss).add_to(batch)
        warn_of_large_advantages(step, rollout)
        begin_update()
        with self.observer.phase("train"):
            result = self.policy.train(batch, self._loss_fn)
        self.observer.add_samples(rollout.one_sample_a_prompt(step))
        metrics |= rollout_metrics(rollout) | train_metrics(result)
        return StepOutcome(metrics, result["skip_reasons"], batch)

    @cached_property
    def _loss_fn(self) -> LossFunction:
        return make_loss(self.config.loss_fn, self.config.policy.megatron_cfg.use_fused_linear_logprobs)
