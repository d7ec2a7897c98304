"""Configurations of the training loops and the advantage estimators."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from nemo_rl_mcore.config.base import (
    Float,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    Seconds,
    StrictModel,
    Switched,
    either,
)
from nemo_rl_mcore.config.custom_code import OwnClassConfig
from nemo_rl_mcore.config.loss import DPOLossConfig


class AsyncRolloutsConfig(Switched):
    """Engines answer prompts for later steps while the ranks train; a group is the set of answers to one prompt."""

    max_trajectory_age_steps: NonNegativeInt = 1
    """Maximum age of a group, in steps, relative to the weights being trained; 0 samples and trains in turn (ours)."""
    order: Literal["in_order", "as_completed"] = "in_order"
    """Order in which groups are trained on: as drawn, or as answered within the allowed age (ours)."""
    max_generation_failures: NonNegativeInt = 0
    """Maximum consecutive failures, over all groups, that are retried; one more ends the run."""
    in_flight_weight_updates: bool = True
    """Update the engines' weights while they answer; false waits until no group is in flight."""
    recompute_kv_cache_after_weight_updates: bool = False
    """Recompute the key-value cache of unfinished answers after a weight update; vLLM always does."""
    min_groups_for_streaming_train: PositiveInt | None = None
    """Number of ready groups needed for a step to start training; null waits for all groups of the step."""
    max_inflight_prompts: PositiveInt | None = None
    """Maximum groups in flight at a time; null means (max_trajectory_age_steps + 1) * num_prompts_per_step."""
    rollout_timeout_s: Seconds | None = None
    """Seconds allowed per turn of a group before the group is retried; null means no limit (ours)."""
    stall_timeout_s: Seconds | None = None
    """Seconds without an answered group or finished step after which the run ends, not counting saves and validations;
    null means no limit."""

    rules = (
        Rule(
            "too-small",
            "stall_timeout_s",
            lambda own: (
                own.enabled
                and own.rollout_timeout_s is not None
                and own.stall_timeout_s is not None
                and own.stall_timeout_s <= own.rollout_timeout_s
            ),
            ("rollout_timeout_s",),
            "raise it, or lower rollout_timeout_s",
            "a slow group would end the run before its own timeout",
        ),
    )


class AdvantageEstimatorConfig(OwnClassConfig):
    """The advantage estimator. Each key's description begins with the estimators that read it.

    In PPO a class of your own receives the critic's values, as gae does.
    """

    name: Literal["grpo", "gdpo", "reinforce_plus_plus", "gae"] = "grpo"
    """Estimator: group-relative advantages (grpo), the same separately for each reward (gdpo), REINFORCE++
    (reinforce_plus_plus), or generalised advantage estimation with a critic (gae)."""
    use_leave_one_out_baseline: bool = True
    """grpo, gdpo: use the mean reward of the group's other samples as a sample's baseline."""
    normalize_rewards: bool = True
    """grpo, gdpo: divide by the group's standard deviation."""
    minus_baseline: bool = True
    """reinforce_plus_plus: subtract the group's mean reward."""
    gae_lambda: Fraction = 0.95
    """gae: lambda, from 0 (least variance, most bias) to 1 (most variance, least bias)."""
    gae_gamma: Fraction = 1.0
    """gae: discount factor per token."""
    normalize_advantages: bool = True
    """gae: normalise the advantages to mean 0 and variance 1 over the batch's tokens."""
    gae_lambda_value: Fraction | None = None
    """gae: lambda for the critic's targets; null means gae_lambda."""
    gae_lambda_policy: Fraction | None = None
    """gae: lambda for the advantages; null means gae_lambda."""
    length_adaptive_alpha: NonNegativeFloat = 0.0
    """gae: alpha; above 0, lambda for the advantages becomes 1 - 1 / (alpha * response length)."""


class RewardScalingConfig(Switched):
    """A linear map of rewards from the source interval to the target interval; rewards outside are clamped."""

    source_min: Float = 0.0
    """Reward that is mapped to target_min."""
    source_max: Float = 1.0
    """Reward that is mapped to target_max."""
    target_min: Float = 0.0
    """Reward to which source_min is mapped."""
    target_max: Float = 1.0
    """Reward to which source_max is mapped."""

    rules = (
        Rule(
            "too-small",
            "source_max",
            lambda own: own.enabled and own.source_max <= own.source_min,
            ("source_min",),
        ),
    )


class RewardShapingConfig(Switched):
    """A penalty for responses near the maximum length (DAPO's soft overlong punishment)."""

    overlong_buffer_length: PositiveInt = 128
    """Number of tokens before max_response_length over which the penalty grows from 0."""
    overlong_buffer_penalty: NonNegativeFloat = 1.0
    """Penalty at max_response_length."""
    max_response_length: PositiveInt | None = None
    """Response length, in tokens, penalized by overlong_buffer_penalty; null only if enabled is false."""

    rules = (
        Rule(
            "missing",
            "max_response_length",
            lambda own: own.enabled and not own.max_response_length,
            ("enabled",),
        ),
        Rule(
            "too-large",
            "overlong_buffer_length",
            lambda own: own.enabled and 0 < (own.max_response_length or 0) < own.overlong_buffer_length,
            ("max_response_length",),
        ),
    )


AsyncSection = Annotated[AsyncRolloutsConfig, BeforeValidator(lambda given: {} if given is None else given)]
"""A section for which null means the defaults, as in NeMo RL."""


class LoopConfig(StrictModel):
    """Keys of every algorithm's loop: its length and its validations."""

    max_num_steps: PositiveInt
    """Number of steps after which the run ends."""
    max_num_epochs: PositiveInt | None = 1
    """Passes over a data set on disk after which the run ends; null means no limit. Embedded tasks have no passes."""
    val_period: NonNegativeInt = 0
    """Number of steps between validations; 0 turns periodic validations off."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    max_val_samples: NonNegativeInt | None = 64
    """Maximum held-out prompts to answer per validation; null means all. In SFT and DPO, 0 generates no answers."""
    val_batch_size: PositiveInt = 64
    """Number of validation prompts answered at a time."""

    @property
    def validates(self) -> bool:
        """True if the run has any validation."""
        return bool(self.val_period) or self.val_at_start or self.val_at_end


class RolloutConfig(LoopConfig):
    """Keys of loops that learn from the policy's own answers."""

    num_prompts_per_step: PositiveInt
    """Number of prompts per step."""
    num_generations_per_prompt: PositiveInt
    """Number of responses sampled for each prompt, which form a group."""
    overlong_filtering: bool = False
    """Exclude from the loss responses that reach the maximum length without ending."""
    use_dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal with groups for new prompts (DAPO)."""
    batch_multiplier: PositiveFloat = 1.0
    """Prompts per generation round of dynamic sampling, as a multiple of num_prompts_per_step."""
    val_greedy: bool = True
    """Decode greedily in validation; false samples with the settings of policy.generation, as in training (ours)."""
    val_num_generations_per_prompt: PositiveInt = 1
    """Answers per validation prompt; above 1 adds pass_k, the share of prompts with a rewarded answer."""
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    """The penalty for long responses."""
    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    """The linear map of rewards."""
    adv_estimator: AdvantageEstimatorConfig = AdvantageEstimatorConfig()
    """The advantage estimator; in distillation, read only if loss_fn.rl_weight is above 0."""

    read_unless = (("batch_multiplier", "use_dynamic_sampling", False),)

    rules = (
        Rule(
            "not-allowed",
            "max_val_samples",
            lambda own: own.max_val_samples == 0,
            fix="allowed: an integer of at least 1, or null",
        ),
        either(
            "incompatible",
            {"val_num_generations_per_prompt": 1, "val_greedy": False},
            "the likeliest answer is the same each time",
        ),
        Rule(
            "no-signal",
            "use_dynamic_sampling",
            lambda own: own.use_dynamic_sampling and own.num_generations_per_prompt == 1,
            ("num_generations_per_prompt",),
            "set num_generations_per_prompt to 2 or more, or use_dynamic_sampling: false",
            "a single reward has no variance, so every group would be dropped",
        ),
    )


class EpisodesConfig(RolloutConfig):
    """Keys of loops that learn from episodes."""

    max_rollout_turns: PositiveInt = 1
    """Maximum answers per episode; an episode that the environment has not ended by then is truncated.

    An episode is also truncated if its next answer may not fit into policy.max_total_sequence_length."""


class GRPOConfig(EpisodesConfig):
    """The GRPO loop: sampling, length, validations and advantages."""

    advantage_clip_low: Float | None = None
    """Lower bound on advantages; null means no bound."""
    advantage_clip_high: Float | None = None
    """Upper bound on advantages; null means no bound."""
    invalid_tool_call_advantage: Float | None = None
    """Advantage for all tokens of an agent's answer with a tool call that cannot be read; null leaves it unchanged."""
    malformed_thinking_advantage: Float | None = None
    """Advantage for all tokens of an agent's answer with a misplaced thinking tag; null leaves it unchanged."""
    async_grpo: AsyncSection = AsyncRolloutsConfig()
    """Asynchronous rollouts: engines sample for later steps during training."""

    rules = (
        Rule(
            "too-large",
            "advantage_clip_low",
            lambda own: (
                own.advantage_clip_low is not None
                and own.advantage_clip_high is not None
                and own.advantage_clip_low >= own.advantage_clip_high
            ),
            ("advantage_clip_high",),
            why="all advantages would be one",
        ),
        Rule(
            "incompatible",
            "adv_estimator.name",
            lambda own: own.adv_estimator.name == "gae",
            fix="set adv_estimator.name: grpo, gdpo or reinforce_plus_plus",
            why="gae needs a critic, and GRPO has none",
        ),
        Rule(
            "no-signal",
            "num_generations_per_prompt",
            lambda own: (
                own.num_generations_per_prompt == 1
                and not own.use_dynamic_sampling
                and own.adv_estimator.type is None
                and (own.adv_estimator.name in ("grpo", "gdpo") or own.adv_estimator.minus_baseline)
            ),
            ("adv_estimator.name",),
            "set it to 2 or more",
            "each answer would be its own baseline, so every advantage is 0",
        ),
        *EpisodesConfig.rules,
    )


class PPOConfig(EpisodesConfig):
    """The PPO loop: advantages from a critic, and one or more passes over each rollout."""

    ppo_epochs: PositiveInt = 1
    """Number of passes over each rollout, with policy.train_global_batch_size samples per optimizer step."""
    critic_warmup_steps: NonNegativeInt = 0
    """Number of initial steps that train only the critic."""
    adv_estimator: AdvantageEstimatorConfig = AdvantageEstimatorConfig(name="gae")
    """The advantage estimator, which can also read the critic's values."""
    async_ppo: AsyncSection = AsyncRolloutsConfig()
    """Asynchronous rollouts: engines sample for later steps during training."""

    rules = (
        *EpisodesConfig.rules,
        Rule(
            "incompatible",
            "adv_estimator.name",
            lambda own: own.adv_estimator.name != "gae",
            fix={"adv_estimator.name": "gae"},
            why="it does not use PPO's critic",
        ),
    )


class DistillationConfig(RolloutConfig):
    """The distillation loop: a student learns a teacher's token probabilities on its own or given answers."""

    on_policy: bool = True
    """Learn from the student's own answers; false uses the data set's answers."""
    topk_logits_k: PositiveInt | None = 64
    """Number of the teacher's most probable tokens to learn at each position; null means the whole vocabulary."""
    async_distillation: AsyncSection = AsyncRolloutsConfig()
    """Asynchronous rollouts: engines answer later steps' prompts during training; only with on_policy (ours)."""

    rules = (
        *RolloutConfig.rules,
        Rule(
            "incompatible",
            "adv_estimator.name",
            lambda own: own.adv_estimator.name == "gae",
            fix="set adv_estimator.name: grpo, gdpo or reinforce_plus_plus",
            why="gae needs a critic, and distillation has none",
        ),
        either(
            "incompatible",
            {"num_generations_per_prompt": 1, "on_policy": True},
            "each prompt has its one given answer",
        ),
    )


class GivenRowsConfig(LoopConfig):
    """Keys of loops that learn from given rows; a sample is a row, or a pair."""

    val_batches: Literal[-1] | PositiveInt = 1
    """Number of held-out batches in the validation loss; -1 means all."""
    val_global_batch_size: PositiveInt | None = None
    """Samples per validation batch, except perhaps the last; null means policy.train_global_batch_size."""


class SFTConfig(GivenRowsConfig):
    """The supervised fine-tuning loop: a step trains on policy.train_global_batch_size of the data set's answers."""


class DPOConfig(GivenRowsConfig, DPOLossConfig):
    """The direct preference optimization loop and loss; a step has policy.train_global_batch_size pairs."""

    num_generations_per_prompt: PositiveInt | None = None
    """Number of sampled answers whose best and worst form a pair (online DPO); null uses the data set's pairs."""
    async_dpo: AsyncSection = AsyncRolloutsConfig()
    """Asynchronous rollouts: engines answer later steps' prompts during training; only for online DPO (ours)."""

    rules = (
        *DPOLossConfig.rules,
        Rule(
            "too-small",
            "num_generations_per_prompt",
            lambda own: own.num_generations_per_prompt == 1,
            fix="set it to 2 or more, or to null",
            why="a pair needs two answers",
        ),
        Rule(
            "too-small",
            "max_val_samples",
            lambda own: (
                own.num_generations_per_prompt is not None and own.validates and own.max_val_samples == 0
            ),
            ("num_generations_per_prompt",),
            "set it to 1 or more, or turn validation off (val_period: 0)",
            "a validation has nothing to do",
        ),
    )
