"""Configurations of the loops that sample, and of the advantage estimators."""

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
    SwitchedConfig,
)
from nemo_rl_mcore.config.custom_code import OwnClassConfig
from nemo_rl_mcore.config.loss import DPOLossConfig


class AsyncRolloutsConfig(SwitchedConfig):
    """Engines answer the prompts of later steps while the ranks train; a group is the answers to one prompt."""

    max_trajectory_age_steps: NonNegativeInt = 1
    """Training steps that a group may be older than the weights it trains; 0 keeps the synchronous pace (ours)."""
    order: Literal["in_order", "as_completed"] = "in_order"
    """In which order groups train (ours): that of their draw, or as they are answered, none older than allowed."""
    max_generation_failures: NonNegativeInt = 0
    """Failures in a row, over all groups, that are answered by trying again; the next one ends the run."""
    in_flight_weight_updates: bool = True
    """Give engines new weights while they answer; false first waits until no group is being answered."""
    recompute_kv_cache_after_weight_updates: bool = False
    """Read begun answers again with new weights; vLLM always does, the embedded engine else keeps its cache."""
    min_groups_for_streaming_train: PositiveInt | None = None
    """Groups at least that a step trains on as soon as they are there; null waits for the whole step."""
    max_inflight_prompts: PositiveInt | None = None
    """Groups that are being answered at most; null is (max_trajectory_age_steps + 1) * num_prompts_per_step."""
    rollout_timeout_s: Seconds | None = None
    """Time in which a group must be answered, each turn, or it is given up and tried again (ours); null: no limit."""
    stall_timeout_s: Seconds | None = None
    """Time without an answered group or a finished step that ends the run; saves and validations do not count."""

    @property
    def off_policy(self) -> bool:
        """Return whether groups may be older than the weights that they train."""
        return self.enabled and self.max_trajectory_age_steps > 0

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
            "a slow group would end the run before it is given up",
        ),
    )


class AdvantageEstimatorConfig(OwnClassConfig):
    """How rewards become advantages; a key is read only by the estimators it names.

    A class of one's own is given values where it is PPO's, as gae is.
    """

    name: Literal["grpo", "gdpo", "reinforce_plus_plus", "gae"] = "grpo"
    """The estimator: group-relative, the same for each of several rewards, REINFORCE++, or generalised advantage
    estimation with a critic."""
    use_leave_one_out_baseline: bool = True
    """grpo, gdpo: the baseline of a sample is the mean of the other members of its group."""
    normalize_rewards: bool = True
    """grpo, gdpo: divide by the standard deviation of the group."""
    minus_baseline: bool = True
    """reinforce_plus_plus: subtract the mean of the group."""
    gae_lambda: Fraction = 0.95
    """gae: the trade of bias (0) against variance (1)."""
    gae_gamma: Fraction = 1.0
    """gae: the discount per token."""
    normalize_advantages: bool = True
    """gae: whiten the advantages over the tokens of the batch."""
    gae_lambda_value: Fraction | None = None
    """gae: lambda of the critic's targets; null is gae_lambda."""
    gae_lambda_policy: Fraction | None = None
    """gae: lambda of the advantages; null is gae_lambda."""
    length_adaptive_alpha: NonNegativeFloat = 0.0
    """gae: above 0, the lambda of the advantages becomes 1 - 1 / (alpha * length)."""


class RewardScalingConfig(SwitchedConfig):
    """A linear map of the reward from the source to the target interval; values outside are clamped."""

    source_min: Float = 0.0
    """Reward that becomes target_min."""
    source_max: Float = 1.0
    """Reward that becomes target_max."""
    target_min: Float = 0.0
    """Lower end of the result."""
    target_max: Float = 1.0
    """Upper end of the result."""

    rules = (
        Rule(
            "too-small",
            "source_max",
            lambda own: own.enabled and own.source_max <= own.source_min,
            ("source_min",),
        ),
    )


class RewardShapingConfig(SwitchedConfig):
    """The penalty for responses that come close to the maximum length (DAPO's soft overlong punishment)."""

    overlong_buffer_length: PositiveInt = 128
    """Tokens before max_response_length over which the penalty grows from 0."""
    overlong_buffer_penalty: NonNegativeFloat = 1.0
    """Penalty at max_response_length."""
    max_response_length: PositiveInt | None = None
    """Response length with the full penalty; needed when enabled."""

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
"""A null section is one that is left out, as in NeMo RL."""


class LoopConfig(StrictModel):
    """The loop of every algorithm: for how long it runs, and when it validates."""

    max_num_steps: PositiveInt
    """Steps after which the run ends."""
    max_num_epochs: PositiveInt | None = 1
    """Passes over a data set on disk after which the run ends, null without end; embedded tasks draw without end."""
    val_period: NonNegativeInt = 0
    """Steps between validations; 0 leaves them out."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    max_val_samples: NonNegativeInt | None = 64
    """Held-out prompts that a validation answers at most, null all; 0, of SFT and DPO alone, leaves answers out."""
    val_batch_size: PositiveInt = 64
    """Prompts generated at a time in a validation."""

    @property
    def async_key(self) -> str:
        """The key of asynchronous rollouts; empty where the algorithm cannot have them."""
        return next((name for name in type(self).model_fields if name.startswith("async_")), "")

    @property
    def estimator_type(self) -> str | None:
        """Return the class of the user's own that takes the place of the advantage estimator."""
        estimator = getattr(self, "adv_estimator", None)
        return estimator.type if isinstance(estimator, AdvantageEstimatorConfig) else None

    @property
    def validates(self) -> bool:
        """Return whether there is any validation."""
        return bool(self.val_period) or self.val_at_start or self.val_at_end

    @property
    def validation_answers(self) -> tuple[int, bool]:
        """Return how many answers a validation has to each prompt, and whether they are the likeliest."""
        return 1, True


class RolloutConfig(LoopConfig):
    """The loop of algorithms that learn from the policy's own answers."""

    num_prompts_per_step: PositiveInt
    """Prompts drawn per step."""
    num_generations_per_prompt: PositiveInt
    """Responses sampled for each prompt; together they are one group."""
    overlong_filtering: bool = False
    """Leave responses that hit the maximum length without an end out of the loss."""
    use_dynamic_sampling: bool = False
    """Draw further prompts in place of groups whose rewards are all equal (DAPO)."""
    batch_multiplier: PositiveFloat = 1.0
    """Prompts per generation round of dynamic sampling, in units of num_prompts_per_step."""
    val_greedy: bool = True
    """A validation takes the likeliest tokens; false samples as training does, at policy.generation (ours)."""
    val_num_generations_per_prompt: PositiveInt = 1
    """Answers of a validation to each prompt; more than one also give pass_k, the share of prompts with a reward."""
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    """The penalty for long responses."""
    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    """The linear map of the reward."""
    adv_estimator: AdvantageEstimatorConfig = AdvantageEstimatorConfig()
    """How rewards become advantages; of a distillation, where loss_fn.rl_weight is above 0."""

    @property
    def validation_answers(self) -> tuple[int, bool]:
        """Return how many answers a validation has to each prompt, and whether they are the likeliest."""
        return self.val_num_generations_per_prompt, self.val_greedy

    @property
    def prompts_per_round(self) -> float:
        """Prompts that a synchronous step asks for at a time, which the rules ask to be whole."""
        return self.num_prompts_per_step * (self.batch_multiplier if self.use_dynamic_sampling else 1)

    @property
    def samples_per_step(self) -> int:
        """Prompts times responses: the rows of one rollout."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    read_unless = (("batch_multiplier", "use_dynamic_sampling", False),)

    rules = (
        Rule(
            "not-allowed",
            "max_val_samples",
            lambda own: own.max_val_samples == 0,
            fix="allowed: an integer, at least 1, or null",
        ),
        Rule(
            "incompatible",
            "val_num_generations_per_prompt",
            lambda own: own.val_greedy and own.val_num_generations_per_prompt > 1,
            ("val_greedy",),
            {"val_greedy": False, "val_num_generations_per_prompt": 1},
            "the likeliest answer is the same each time",
        ),
        Rule(
            "no-signal",
            "use_dynamic_sampling",
            lambda own: own.use_dynamic_sampling and own.num_generations_per_prompt == 1,
            ("num_generations_per_prompt",),
            "set num_generations_per_prompt to 2 or more, or use_dynamic_sampling: false",
            "one reward has no variance, so that every group is dropped",
        ),
    )


class EpisodesConfig(RolloutConfig):
    """The loop of algorithms that learn from episodes."""

    max_rollout_turns: PositiveInt = 1
    """Answers of an episode at most; the environment may end it before. One that it has not ended is truncated.

    An episode whose next answer may not fit into policy.max_total_sequence_length is, too."""


class GRPOConfig(EpisodesConfig):
    """The GRPO loop: how much is sampled per step, for how long, and how it is judged."""

    advantage_clip_low: Float | None = None
    """Advantages below this become it; null leaves them."""
    advantage_clip_high: Float | None = None
    """Advantages above this become it; null leaves them."""
    async_grpo: AsyncSection = AsyncRolloutsConfig()
    """Asynchronous rollouts: later steps are sampled while one trains."""

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
            "the baseline of an answer is its own reward, so that every advantage is 0",
        ),
        *EpisodesConfig.rules,
    )


class PPOConfig(EpisodesConfig):
    """The PPO loop: rollouts judged by a critic, several optimizer steps over each."""

    ppo_epochs: PositiveInt = 1
    """Passes over a rollout; each takes policy.train_global_batch_size samples per optimizer step."""
    critic_warmup_steps: NonNegativeInt = 0
    """First steps that train the critic alone."""
    adv_estimator: AdvantageEstimatorConfig = AdvantageEstimatorConfig(name="gae")
    """How rewards and values become advantages."""
    async_ppo: AsyncSection = AsyncRolloutsConfig()
    """Asynchronous rollouts: later steps are sampled while one trains."""

    rules = (
        *EpisodesConfig.rules,
        Rule(
            "incompatible",
            "adv_estimator.name",
            lambda own: own.adv_estimator.name != "gae",
            fix={"adv_estimator.name": "gae"},
            why="it leaves the critic of PPO without use",
        ),
    )


class DistillationConfig(RolloutConfig):
    """The distillation loop: answers of the student or of the data set, and what the teacher says of each token."""

    on_policy: bool = True
    """Learn from the student's own answers; false takes those of the data set."""
    topk_logits_k: PositiveInt | None = 64
    """Most probable tokens that the teacher names at each position; null is the whole vocabulary."""
    async_distillation: AsyncSection = AsyncRolloutsConfig()
    """Asynchronous rollouts (ours): answers of later steps are sampled while one trains; on policy only."""

    rules = (
        *RolloutConfig.rules,
        Rule(
            "incompatible",
            "adv_estimator.name",
            lambda own: own.adv_estimator.name == "gae",
            fix="set adv_estimator.name: grpo, gdpo or reinforce_plus_plus",
            why="gae needs a critic, and distillation has none",
        ),
        Rule(
            "incompatible",
            "num_generations_per_prompt",
            lambda own: not own.on_policy and own.num_generations_per_prompt != 1,
            ("on_policy",),
            {"num_generations_per_prompt": 1},
            "each prompt has its one given answer",
        ),
    )


class GivenRowsConfig(LoopConfig):
    """The loop of algorithms that learn from given rows, of which a sample is one, or a pair."""

    val_batches: Literal[-1] | PositiveInt = 1
    """Batches of held-out samples of which a validation takes the loss, at most as many as there are; -1 is all."""
    val_global_batch_size: PositiveInt | None = None
    """Samples of such a batch, the last of which may have fewer; null is policy.train_global_batch_size."""


class SFTConfig(GivenRowsConfig):
    """Supervised fine-tuning: a step is policy.train_global_batch_size answers of the data set."""


class DPOConfig(GivenRowsConfig, DPOLossConfig):
    """Direct preference optimization: a step is policy.train_global_batch_size pairs. The loss has its keys here."""

    num_generations_per_prompt: PositiveInt | None = None
    """Answers of the policy of which the best and the worst make a pair (online); null takes the data set's pairs."""
    async_dpo: AsyncSection = AsyncRolloutsConfig()
    """Asynchronous rollouts (ours): the answers of later steps are sampled while one trains; online only."""

    @property
    def online(self) -> bool:
        """Return whether the pairs are made of the policy's answers."""
        return self.num_generations_per_prompt is not None

    rules = (
        *DPOLossConfig.rules,
        Rule(
            "too-small",
            "num_generations_per_prompt",
            lambda own: own.num_generations_per_prompt == 1,
            fix="set it to 2 or more, or to null",
            why="one answer makes no pair",
        ),
        Rule(
            "too-small",
            "max_val_samples",
            lambda own: own.online and own.validates and own.max_val_samples == 0,
            ("num_generations_per_prompt",),
            "set it to 1 or more, or turn validation off (val_period: 0)",
            "a validation has nothing to do",
        ),
    )

    @property
    def loss(self) -> DPOLossConfig:
        """Return the keys of the loss alone."""
        return DPOLossConfig(**{name: getattr(self, name) for name in DPOLossConfig.model_fields})
