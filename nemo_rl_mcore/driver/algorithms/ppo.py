"""PPO: sample answers, estimate every token's value with a critic, and train both models on them several times.

Sources: PPO https://arxiv.org/abs/1707.06347, advantages https://arxiv.org/abs/1506.02438.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nemo_rl_mcore.config import PPOMasterConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.advantages import estimator_of, warn_of_large_advantages
from nemo_rl_mcore.driver.algorithms.algorithm import (
    Algorithm,
    Judged,
    StepOutcome,
    join_results,
    train_metrics,
)
from nemo_rl_mcore.driver.algorithms.mismatch import (
    add_compared_logprobs,
    comparison_metrics,
    model_inputs,
    with_row_numbers,
)
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.rollouts.scheduler import Step
from nemo_rl_mcore.driver.rollouts.transcript import require_sampled_ids, trained_columns
from nemo_rl_mcore.losses import make_loss
from nemo_rl_mcore.rank.train_step import EMPTY_STEP


@dataclass(frozen=True)
class PPOTrainer(Algorithm[PPOMasterConfig]):
    critic: Policy

    def judge(self, step: Step) -> Judged:
        with self.observer.phase("generation"):
            rollout = step.whole()
        batch = rollout.batch
        with self.observer.phase("logprobs"):
            mismatch = add_compared_logprobs(self.config, self.policy, step.number, batch)
        with self.observer.phase("values"):
            batch["values"] = self.critic.get_values(model_inputs(batch))["values"]
        estimator_of(self.config, self.config.loss_fn).add_to(batch)
        warn_of_large_advantages(step.number, rollout)
        require_sampled_ids(batch)
        return Judged(batch, rollout, mismatch)

    def update(self, step: Step, judged: Judged) -> StepOutcome:
        """Train both models `ppo_epochs` times; the policy only after `critic_warmup_steps` steps."""
        batch, config = judged.batch, self.config
        value_loss = make_loss(config.value_loss_fn, section="value_loss_fn")
        policy_epochs, critic_epochs = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
        with self.training(step.number, judged.rollout) as metrics:
            for epoch in range(config.ppo.ppo_epochs):
                rows = shuffled(with_row_numbers(trained_columns(batch)), config.seed, step.number, epoch)
                critic_epochs.append(self.critic.train(rows, value_loss))
                if step.number > config.ppo.critic_warmup_steps:
                    policy_epochs.append(self.policy.train(rows, self.loss_fn))
        of_critic = join_results(critic_epochs)
        metrics |= step.finish() | train_metrics(of_critic, "value")
        metrics["value/explained_variance"] = explained_variance(batch)
        reasons, of_policy = of_critic["skip_reasons"], join_results(policy_epochs) if policy_epochs else {}
        if of_policy:
            metrics |= train_metrics(of_policy)
            # A minibatch counts as skipped if either model skipped it, so that a run ends if one model is stuck.
            reasons = [
                next(
                    (one for one in pair if one not in (None, EMPTY_STEP)),
                    None if None in pair else EMPTY_STEP,
                )
                for pair in zip(of_policy["skip_reasons"], reasons, strict=True)
            ]
        if of_policy or judged.mismatch:
            metrics |= comparison_metrics(config, step.number, batch, judged.mismatch, of_policy)
        return StepOutcome(metrics, reasons, batch)


def shuffled(batch: BatchedDataDict, seed: int, step: int, epoch: int) -> BatchedDataDict:
    """Return the episodes in an order that differs between epochs but is the same in every run with this seed."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + epoch)
    samples = batch.samples()
    order: list[int] = torch.randperm(len(samples), generator=generator).tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return batch.select_indices([row for number in order for row in samples[number]])


def explained_variance(batch: BatchedDataDict) -> float:
    """Return the share of the returns' variance that the critic explains; 0 if the returns do not vary."""
    counts = (batch["token_mask"] * batch["sample_mask"].unsqueeze(1)) != 0
    returns = batch["returns"][counts].double()
    values = batch["values"][counts].double()
    # Because of rounding, the computed variance of equal numbers may not be 0.
    if bool((returns == returns[:1]).all()):
        return 0.0
    return 1 - float((returns - values).var() / returns.var())
