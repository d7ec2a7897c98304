"""GRPO: answer prompts, score the answers, compare them within their group, train.

No Ray and no Megatron here: the policy and the engine come in behind `interfaces`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from torch import Tensor

from nemo_rl_mcore.algorithms.advantages import make_advantage_estimator, warn_of_large_advantages
from nemo_rl_mcore.algorithms.algorithm import Algorithm, StepOutcome
from nemo_rl_mcore.algorithms.episodes import trained_columns
from nemo_rl_mcore.algorithms.logprobs import add_logprobs, policy_loss
from nemo_rl_mcore.algorithms.mismatch import (
    Mismatch,
    act_on_mismatch,
    table_of_batch,
    table_of_training,
    with_row_numbers,
)
from nemo_rl_mcore.algorithms.rollout import Rollout
from nemo_rl_mcore.algorithms.sampled_ids import require_sampled_ids
from nemo_rl_mcore.algorithms.sampling import Sampling
from nemo_rl_mcore.algorithms.step_metrics import rollout_metrics, train_metrics
from nemo_rl_mcore.config import GRPOMasterConfig
from nemo_rl_mcore.config.prev_logprobs import reader_of_prev_logprobs
from nemo_rl_mcore.config.vllm import MismatchConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import LossFunction


class GRPO(Algorithm[GRPOMasterConfig]):
    """Group relative policy optimization, https://arxiv.org/abs/2402.03300."""

    def step(self, step: int, begin_update: Callable[[], None]) -> StepOutcome:
        """Sample, judge, train."""
        with self.observer.phase("generation"):
            rollout, metrics = Sampling(self, self.config.grpo).roll_out(step)
        found = self._judge(step, rollout)
        begin_update()
        with self.observer.phase("train"):
            result = self.policy.train(self._trained(rollout), self._loss_fn)
        self.record(step, rollout)
        if found is None:
            found = self._compare(step, rollout.batch, table_of_training(result, rollout.batch.size))
        metrics |= found.metrics(self._mismatch.threshold)
        metrics |= rollout_metrics(rollout) | train_metrics(result)
        return StepOutcome(metrics, result["skip_reasons"], rollout.batch)

    def _judge(self, step: int, rollout: Rollout) -> Mismatch | None:
        """Add to whole groups what the loss needs besides the answers: log-probabilities and advantages.

        Returns the comparison with the engine where a pass before training makes it.
        """
        loss, batch = self.config.loss_fn, rollout.batch
        with self.observer.phase("logprobs"):
            add_logprobs(batch, self.policy, loss, previous=self._passes_before)
        table = table_of_batch(batch, loss.reference_policy_kl_type) if self._passes_before else None
        found = None if table is None else self._compare(step, batch, table)
        make_advantage_estimator(self.config.grpo.adv_estimator, loss).add_to(batch)
        warn_of_large_advantages(step, rollout)
        require_sampled_ids(batch)
        return found

    def _trained(self, rollout: Rollout, first_row: int = 0) -> BatchedDataDict:
        """Return the columns that go to the ranks; first_row: the number of the first row in the step."""
        columns = trained_columns(rollout.batch)
        return columns if self._passes_before else with_row_numbers(columns, first_row)

    def _compare(self, step: int, batch: BatchedDataDict, table: Tensor) -> Mismatch:
        """Return the comparison with the engine, after the action that the recipe asks for."""
        found = Mismatch.of(batch, table, self._on_policy_rows(step, batch))
        act_on_mismatch(step, batch, found, self._mismatch)
        return found

    def _on_policy_rows(self, step: int, batch: BatchedDataDict) -> Tensor | None:
        """Return bool [B], the rows that were sampled by the weights that train; None for all."""
        return None

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
