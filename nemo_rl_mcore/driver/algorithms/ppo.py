"""PPO: sample, judge every token with the help of a critic, train both over the rollout several times.

https://arxiv.org/abs/1707.06347; advantages are those of https://arxiv.org/abs/1506.02438.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_rl_mcore.config import PPOMasterConfig
from nemo_rl_mcore.config.prev_logprobs import reader_of_prev_logprobs
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.advantages import warn_of_large_advantages
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, StepOutcome
from nemo_rl_mcore.driver.algorithms.custom_estimator import estimator_of
from nemo_rl_mcore.driver.algorithms.logprobs import add_logprobs, model_inputs, policy_loss
from nemo_rl_mcore.driver.algorithms.mismatch import (
    Mismatch,
    compare_with_engine,
    comparison_metrics,
    table_of_batch,
    table_of_training,
    with_row_numbers,
)
from nemo_rl_mcore.driver.algorithms.step_metrics import join_results, train_metrics
from nemo_rl_mcore.driver.interfaces import ValueInterface
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.driver.rollouts.sampled_ids import require_sampled_ids
from nemo_rl_mcore.driver.rollouts.steps import StepGroups
from nemo_rl_mcore.driver.rollouts.transcript import trained_columns
from nemo_rl_mcore.losses import make_loss
from nemo_rl_mcore.rank.train_step import EMPTY_STEP


@dataclass(frozen=True)
class PPO(Algorithm[PPOMasterConfig]):
    """Proximal policy optimization with a critic."""

    critic: ValueInterface

    def train(self, step: int, groups: StepGroups | None, begin_update: Callable[[], None]) -> StepOutcome:
        """Judge the groups, train on them `ppo_epochs` times."""
        assert groups is not None
        with self.observer.phase("generation"):
            rollout = groups.whole()
        found = self._judge(step, rollout)
        batch, config = rollout.batch, self.config
        begin_update()
        with self.training(step, rollout) as metrics:
            of_policy, of_critic = self._train(step, batch)
        metrics |= groups.finish() | train_metrics(of_critic, "value")
        metrics["value/explained_variance"] = explained_variance(batch)
        reasons, mismatch = of_critic["skip_reasons"], config.policy.generation.mismatch
        if of_policy is not None:
            if found is None:
                table = table_of_training(of_policy, batch.size)
                found = compare_with_engine(step, batch, table, mismatch)
            metrics |= train_metrics(of_policy)
            reasons = skip_reasons_of_both(of_policy["skip_reasons"], reasons)
        if found is not None:
            metrics |= comparison_metrics(found, batch, mismatch.threshold, asynchronous=config.asynchronous)
        return StepOutcome(metrics, reasons, batch)

    def _judge(self, step: int, rollout: Rollout) -> Mismatch | None:
        """Add log-probabilities, values and advantages; see `GRPO._judge`."""
        config, loss, batch = self.config, self.config.loss_fn, rollout.batch
        passes_before = reader_of_prev_logprobs(config) is not None
        with self.observer.phase("logprobs"):
            add_logprobs(batch, self.policy, loss, previous=passes_before)
        found = None
        if passes_before:
            table = table_of_batch(batch, loss.reference_policy_kl_type)
            found = compare_with_engine(step, batch, table, config.policy.generation.mismatch)
        with self.observer.phase("values"):
            batch["values"] = self.critic.get_values(model_inputs(batch))["values"]
        estimator_of(config, loss).add_to(batch)
        warn_of_large_advantages(step, rollout)
        require_sampled_ids(batch)
        return found

    def _train(self, step: int, batch: BatchedDataDict) -> tuple[Mapping[str, Any] | None, Mapping[str, Any]]:
        """Return the results of the policy, None while only the critic warms up, and of the critic, over all epochs."""
        ppo, loss = self.config.ppo, policy_loss(self.config)
        value_loss = make_loss(self.config.value_loss_fn, section="value_loss_fn")
        of_policy: list[Mapping[str, Any]] = []
        of_critic: list[Mapping[str, Any]] = []
        for epoch in range(ppo.ppo_epochs):
            rows = shuffled(with_row_numbers(trained_columns(batch)), self.config.seed, step, epoch)
            of_critic.append(self.critic.train(rows, value_loss))
            if step > ppo.critic_warmup_steps:
                of_policy.append(self.policy.train(rows, loss))
        return join_results(of_policy) if of_policy else None, join_results(of_critic)


def shuffled(batch: BatchedDataDict, seed: int, step: int, epoch: int) -> BatchedDataDict:
    """Return the episodes in the order of an epoch: other minibatches each time, the same in every run."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + epoch)
    samples = batch.samples()
    order: list[int] = torch.randperm(len(samples), generator=generator).tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return batch.select_indices([row for number in order for row in samples[number]])


def skip_reasons_of_both(
    of_policy: Sequence[str | None], of_critic: Sequence[str | None]
) -> list[str | None]:
    """Say why a minibatch was skipped by either model: a run in which one of them is stuck must end, too."""
    reasons: list[str | None] = []
    for pair in zip(of_policy, of_critic, strict=True):
        nothing_failed = None if None in pair else EMPTY_STEP
        reasons.append(next((one for one in pair if one not in (None, EMPTY_STEP)), nothing_failed))
    return reasons


def explained_variance(batch: BatchedDataDict) -> float:
    """Return the share of the returns' variance that the critic explains: 1 - Var(returns - values) / Var(returns).

    0 where the returns do not vary.
    """
    counts = (batch["token_mask"] * batch["sample_mask"].unsqueeze(1)) != 0
    returns, values = batch["returns"][counts].double(), batch["values"][counts].double()
    # The variance of equal numbers need not come out as 0.
    if bool((returns == returns[:1]).all()):
        return 0.0
    return 1 - float((returns - values).var() / returns.var())
