"""Estimate advantages [B,S] from rewards [B].

Sources: GRPO https://arxiv.org/abs/2402.03300, leave-one-out baseline 2402.14740, REINFORCE++ 2501.03262,
GAE 1506.02438, length-adaptive lambda (VAPO) 2504.05118, GDPO 2601.05242. The loss section sets KL type, clamps and
coefficient.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.config.algorithm import AdvantageEstimatorConfig, GRPOConfig
from nemo_rl_mcore.config.custom_code import build, custom_code
from nemo_rl_mcore.config.loss import ClippedPGLossConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.driver.rollouts.transcript import REPLIES, REWARDS_PREFIX, TURN_OF_TOKEN, EpisodeRows
from nemo_rl_mcore.errors import CustomCodeError, RefusedError
from nemo_rl_mcore.losses.base import require
from nemo_rl_mcore.losses.kl import kl_estimate

VARIANCE_FLOOR = 1e-8
STD_EPSILON = 1e-6
USUAL_LIMIT = 100.0
_NAMED_SAMPLES = 4
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class GroupStatistics:
    """Mean and unbiased standard deviation of the rewards that each row is compared with, in fp64."""

    baseline: Tensor
    std: Tensor


def group_statistics(prompt_ids: Tensor, rewards: Tensor, *, leave_one_out: bool) -> GroupStatistics:
    """Return the statistics of each row's group, excluding the row itself if `leave_one_out`.

    A group of one has its own reward as baseline; an undefined deviation is 0. Leave-one-out statistics are computed
    from the other rows directly: subtracting the row from the group's sums would leave rounding errors as the
    deviation if the other rows are equal.
    """
    rewards = rewards.to(torch.float64)
    baseline, std = rewards.clone(), torch.zeros_like(rewards)
    rows = None if prompt_ids.ndim == 1 else 0  # compares single numbers or whole rows
    _, groups = cast("tuple[Tensor, Tensor]", torch.unique(prompt_ids, dim=rows, return_inverse=True))  # pyright: ignore[reportUnknownMemberType]
    order = groups.argsort(stable=True)
    sizes = groups.bincount()[groups[order]]
    for size in sorted(set(cast("list[int]", sizes.tolist()))):  # pyright: ignore[reportUnknownMemberType]
        rows_GN = order[sizes == size].view(-1, size)
        compared = rewards[rows_GN].unsqueeze(1)
        if leave_one_out:  # [G,N,N-1]: for each member, all other members
            members = torch.arange(size, device=rewards.device)
            compared = rewards[rows_GN][:, members[:-1] + (members[:-1] >= members.unsqueeze(1))]
        if compared.shape[-1]:
            first = compared[..., :1]
            shifted = compared - first  # exactly 0 if all are equal, without rounding errors of a sum
            mean = shifted.mean(-1, keepdim=True)
            squares = (shifted - mean).square().sum(-1)
            baseline[rows_GN] = (first + mean).squeeze(-1).expand_as(rows_GN)
            std[rows_GN] = (squares / max(compared.shape[-1] - 1, 1)).sqrt().expand_as(rows_GN)
    return GroupStatistics(baseline, std)


@dataclass(eq=False)
class AdvantageEstimator(ABC):
    """Computes the advantages of a rollout's tokens; `add_to` passes columns to `compute_advantage` by name."""

    with_critic = False
    """True if the estimator needs a critic's values and also computes returns."""
    cfg: AdvantageEstimatorConfig
    loss_cfg: ClippedPGLossConfig
    reward_weights: Mapping[str, float] = field(default_factory=dict[str, float], init=False)

    @abstractmethod
    def compute_advantage(self, *args: Any, **columns: Any) -> Any:
        """Return advantages [B,S], or (advantages, returns) with a critic; args: prompt_ids, rewards and mask."""

    def add_to(self, batch: BatchedDataDict) -> None:
        """Add advantages [B,S] and, with a critic, returns [B,S].

        Reads prompt_index [B], rewards [B], both masks, and [B,S] prev_logprobs, reference_policy_logprobs and values.
        Each episode's rows are joined into one row. A dropped episode has advantages of 0 and does not affect other
        episodes. Raises ValueError for a missing column.
        """
        episodes = EpisodeRows.of(batch)
        rewards = batch["rewards"][episodes.first]
        mask = episodes.joined(batch["token_mask"] * batch["sample_mask"].unsqueeze(1))
        policy, reference = (
            episodes.joined(batch[key]) if key in batch else None
            for key in ("prev_logprobs", "reference_policy_logprobs")
        )
        if not self.with_critic:
            prompts = batch["prompt_index"][episodes.first]
            columns: dict[str, Any] = {"logprobs_policy": policy, "logprobs_reference": reference}
            if self.cfg.name == "gdpo":
                columns["rewards_by_name"] = {
                    key.removeprefix(REWARDS_PREFIX): batch[key][episodes.first]
                    for key in batch
                    if key.startswith(REWARDS_PREFIX)
                }
            advantages = self.compute_advantage(prompts, rewards, mask, **columns)
            batch["advantages"] = episodes.parted(advantages)
            return
        values = episodes.joined(require(batch, "values", "adv_estimator.name: gae"))
        advantages, returns = self.compute_advantage(
            None, rewards, mask, values=values, logprobs=policy, reference_logprobs=reference
        )
        batch["advantages"], batch["returns"] = episodes.parted(advantages), episodes.parted(returns)


def judge_flaws(batch: BatchedDataDict, config: GRPOConfig) -> None:
    """Overwrite the advantages of flawed answers' tokens, see `environment.turns.Reply`."""
    for flaw in ("invalid_tool_call", "malformed_thinking"):
        advantage = getattr(config, f"{flaw}_advantage")
        if advantage is None:
            continue
        turns_BS = batch.get(TURN_OF_TOKEN, batch["token_mask"]).long()
        for turn_S, advantages_S, replies in zip(turns_BS, batch["advantages"], batch[REPLIES], strict=True):
            flawed = [turn for turn, reply in enumerate(replies, start=1) if flaw in reply.get("flaws", ())]
            advantages_S[torch.isin(turn_S, torch.tensor(flawed))] = advantage


class GRPOAdvantageEstimator(AdvantageEstimator):
    """Compares a row's reward with the rewards of all answers to its prompt; all columns get the same advantage."""

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, **_logprobs: Any
    ) -> Tensor:
        """Return advantages [B,S], masked columns included; prompt_ids ([B] or [B,P]) define the groups."""
        advantages = self.against_group(prompt_ids, rewards).to(rewards.dtype)
        return advantages[:, None].expand(mask.shape).clone()

    def against_group(self, prompt_ids: Tensor, rewards: Tensor) -> Tensor:
        """Return fp64 [B]: rewards [B] minus the group's mean, divided by its deviation if `normalize_rewards`."""
        group = group_statistics(prompt_ids, rewards, leave_one_out=self.cfg.use_leave_one_out_baseline)
        advantages = rewards - group.baseline
        if self.cfg.normalize_rewards:
            scaled = advantages / (group.std + STD_EPSILON)
            advantages = torch.where(group.std > 0, scaled, advantages)
        return advantages


class GDPOAdvantageEstimator(GRPOAdvantageEstimator):
    """Computes GRPO's advantage for each named reward separately, then whitens their weighted sum over all rows."""

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        *,
        rewards_by_name: Mapping[str, Tensor] | None = None,
        **_logprobs: Any,
    ) -> Tensor:
        """Return advantages [B,S], masked columns included; rewards_by_name: one tensor [B] per reward.

        Raises ValueError for fewer than two rewards.
        """
        named = rewards_by_name or {}
        if len(named) < 2:
            raise RefusedError(
                f"adv_estimator.name: gdpo needs two rewards or more by name, and the environment gave "
                f"{', '.join(named) or 'none'}",
                code="missing-rewards",
            )
        total = rewards.new_zeros(rewards.shape, dtype=torch.float64)
        for name, values in named.items():
            total += self.reward_weights.get(name, 1.0) * self.against_group(prompt_ids, values)
        total -= total.mean()
        if (std := total.std()) > 0:
            total /= std
        return total.to(rewards.dtype)[:, None].expand(mask.shape).clone()


class ReinforcePlusPlusAdvantageEstimator(AdvantageEstimator):
    """Subtracts the group's mean and the KL penalty from the reward, then whitens over all tokens of the batch."""

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        *,
        logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None,
    ) -> Tensor:
        """Return advantages [B,S], masked columns included; raise ValueError if the KL penalty's inputs are missing."""
        advantages = rewards
        if self.cfg.minus_baseline:
            group = group_statistics(prompt_ids, rewards, leave_one_out=False)
            advantages = (rewards - group.baseline).to(rewards.dtype)
        advantages = advantages[:, None].expand(mask.shape).clone()
        named = {"logprobs_policy": logprobs_policy, "logprobs_reference": logprobs_reference}
        if (penalty := kl_penalty(self.loss_cfg, **named)) is not None:
            advantages = advantages - penalty
        return whiten(advantages, mask, unbiased=False)


class GeneralizedAdvantageEstimator(AdvantageEstimator):
    """Computes GAE over each row's tokens, with separate lambdas for the policy and the critic's targets."""

    with_critic = True

    def compute_advantage(
        self,
        prompt_ids: Tensor | None,
        rewards: Tensor,
        mask: Tensor,
        *,
        values: Tensor,
        logprobs: Tensor | None = None,
        reference_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (advantages, returns), both [B,S]; advantages are 0 on masked columns, and prompt_ids is ignored.

        values and log-probabilities: [B,S]. Raises ValueError if use_kl_in_reward is set without log-probabilities.
        """
        penalty = kl_penalty(self.loss_cfg, logprobs=logprobs, reference_logprobs=reference_logprobs)
        dtype = values.dtype
        # The sum of errors telescopes: in fp32, its rounding errors would make constant returns vary.
        values = values.to(torch.float64)
        # Each mask token gets the negative penalty; the row's last mask token also gets the reward.
        counts = mask != 0
        later = counts.flip(1).cumsum(1).flip(1)  # mask tokens from here to the end of the row
        token_rewards = torch.where(counts & (later == 1), rewards.to(torch.float64)[:, None], 0.0)
        if penalty is not None:
            token_rewards = token_rewards - torch.where(counts, penalty, 0.0)
        cfg = self.cfg
        value_lambda = cfg.gae_lambda if cfg.gae_lambda_value is None else cfg.gae_lambda_value
        policy_lambda = cfg.gae_lambda if cfg.gae_lambda_policy is None else cfg.gae_lambda_policy
        if cfg.length_adaptive_alpha > 0:
            lengths = mask.sum(dim=1).to(torch.float64)
            policy_lambda = (1 - 1 / (cfg.length_adaptive_alpha * lengths).clamp(min=1)).clamp(0, 1)
        gamma = cfg.gae_gamma
        returns = values + discounted_errors(token_rewards, values, mask, gamma=gamma, lam=value_lambda)
        advantages = discounted_errors(token_rewards, values, mask, gamma=gamma, lam=policy_lambda)
        if cfg.normalize_advantages:
            advantages = whiten(advantages, mask, unbiased=True)
        return torch.where(counts, advantages, 0.0).to(dtype), returns.to(dtype)


def discounted_errors(
    token_rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float | Tensor
) -> Tensor:
    """Return [B,S]: for each token, the (gamma * lambda)-discounted sum of its own and all later TD errors.

    Masked columns are skipped: they repeat the result of the next unmasked token. lam: one number, or one per row.
    """
    next_value = values.new_zeros(values.shape[0])
    error_sum = values.new_zeros(values.shape[0])
    columns: list[Tensor] = []
    for t in reversed(range(values.shape[1])):
        counts = mask[:, t] != 0
        td_error = token_rewards[:, t] + gamma * next_value - values[:, t]
        error_sum = torch.where(counts, td_error + gamma * lam * error_sum, error_sum)
        next_value = torch.where(counts, values[:, t], next_value)
        columns.append(error_sum)
    return torch.stack(columns[::-1], dim=1) if columns else torch.zeros_like(values)


def whiten(values: Tensor, mask: Tensor, *, unbiased: bool) -> Tensor:
    """Return (values - mean) / std for every column, with mean and std taken over the mask tokens.

    The computation is in fp64, because the variance floor can multiply an error in the mean by 10,000.
    """
    wide = values.to(torch.float64)
    counted = mask != 0
    total = counted.sum()
    mean = torch.where(counted, wide, 0.0).sum() / total.clamp(min=1)
    squares = torch.where(counted, (wide - mean).square(), 0.0).sum()
    variance = squares / (total - 1 if unbiased else total).clamp(min=1)
    return ((wide - mean) * variance.clamp(min=VARIANCE_FLOOR).rsqrt()).to(values.dtype)


def kl_penalty(loss_cfg: ClippedPGLossConfig, **logprobs: Tensor | None) -> Tensor | None:
    """Return the KL penalty on rewards, or None if they get none. logprobs: the policy's, then the reference's.

    Raises ValueError, naming the missing columns.
    """
    if not loss_cfg.use_kl_in_reward or loss_cfg.reference_policy_kl_penalty == 0:
        return None
    policy, reference = logprobs.values()
    if policy is None or reference is None:
        missing = sorted(name for name, given in logprobs.items() if given is None)
        raise RefusedError(
            f"compute_advantage needs {', '.join(missing)} with use_kl_in_reward: true",
            code="missing-logprobs",
        )
    estimate = kl_estimate(
        policy,
        reference,
        loss_cfg.reference_policy_kl_type,
        input_clamp=loss_cfg.kl_input_clamp_value,
        output_clamp=loss_cfg.kl_output_clamp_value,
    )
    return loss_cfg.reference_policy_kl_penalty * estimate


class _Own(AdvantageEstimator):
    """Wraps a user's class, whose `compute_advantage` must have the signature of a built-in estimator."""

    def __init__(self, cfg: AdvantageEstimatorConfig, loss_cfg: ClippedPGLossConfig, key: str) -> None:
        super().__init__(cfg, loss_cfg)
        assert cfg.type is not None
        self.with_critic = cfg.name == "gae"
        own = build(cfg.type, key, cfg.args, cfg, loss_cfg, needs=("compute_advantage",))
        self._own = cast("AdvantageEstimator", own)
        self._name = f"{key}: {cfg.type}.compute_advantage"

    def compute_advantage(
        self, prompt_ids: Tensor | None, rewards: Tensor, mask: Tensor, **columns: Any
    ) -> Any:
        with custom_code(self._name):
            given = self._own.compute_advantage(prompt_ids, rewards, mask, **columns)
        fault, tensors = "", cast("tuple[object, ...]", given if self.with_critic else (given,))
        if self.with_critic and not (isinstance(given, tuple) and len(tensors) == 2):
            fault, tensors = "no pair of advantages and returns", ()
        for one in tensors:
            if not isinstance(one, Tensor) or one.shape != mask.shape:
                found = tuple(one.shape) if isinstance(one, Tensor) else type(one).__name__
                fault = fault or f"{found} in place of a tensor {tuple(mask.shape)}"
            elif not torch.isfinite(one[mask != 0]).all():
                fault = fault or "a number that is not finite"
        if fault:
            raise CustomCodeError(f"{self._name} gave {fault}", code="estimator-result")
        return cast("Any", given)


_ESTIMATORS: dict[str, type[AdvantageEstimator]] = {
    "grpo": GRPOAdvantageEstimator,
    "gdpo": GDPOAdvantageEstimator,
    "reinforce_plus_plus": ReinforcePlusPlusAdvantageEstimator,
    "gae": GeneralizedAdvantageEstimator,
}


def make_advantage_estimator(
    cfg: AdvantageEstimatorConfig, loss_cfg: ClippedPGLossConfig, key: str = "adv_estimator.type"
) -> AdvantageEstimator:
    """Return the estimator that a section names, or an instance of a user's class, which also receives `args`.

    The estimator is rebuilt in every step, so that runs can resume; it must not keep any state. Raises ValueError,
    naming the key, if the class does not exist or has no `compute_advantage`.
    """
    return _ESTIMATORS[cfg.name](cfg, loss_cfg) if cfg.type is None else _Own(cfg, loss_cfg, key)


def estimator_of(config: RunConfig, loss_cfg: ClippedPGLossConfig) -> AdvantageEstimator:
    section: AdvantageEstimatorConfig = getattr(config.loop, "adv_estimator")  # noqa: B009
    estimator = make_advantage_estimator(section, loss_cfg, f"{config.algorithm}.adv_estimator.type")
    estimator.reward_weights = config.env.reward_weights or {}
    return estimator


def warn_of_large_advantages(step: int, rollout: Rollout) -> None:
    """Write a line to standard error if any trained token's advantage exceeds 100 in absolute value."""
    batch = rollout.batch
    trained = batch["token_mask"] * batch["sample_mask"].unsqueeze(1) > 0
    episodes = EpisodeRows.of(batch)
    largest_E = episodes.joined(batch["advantages"].abs().masked_fill(~trained, 0.0)).amax(1)
    order = largest_E.argsort(descending=True, stable=True)
    above = [int(number) for number in order if largest_E[number] > USUAL_LIMIT]
    if not above:
        return
    named: list[str] = []
    for number in above[:_NAMED_SAMPLES]:
        row = int(episodes.first[number])
        prompt, sample = rollout.prompts[row], int(batch["sample_index"][row])
        text = f"{prompt.text[:_SHOWN_CHARACTERS]}{'...' if len(prompt.text) > _SHOWN_CHARACTERS else ''}"
        size, reward = float(largest_E[number]), float(batch["rewards"][row])
        named.append(f"prompt {prompt.index} {text!r} sample {sample}: {size:.4g} (reward {reward:.4g})")
    more = ", ..." if len(above) > _NAMED_SAMPLES else ""
    write_line(
        sys.stderr,
        f"step {step}: {len(above)} of {len(largest_E)} responses have advantages above {USUAL_LIMIT:g} in absolute "
        f"value and outweigh the others: {', '.join(named)}{more}",
    )
