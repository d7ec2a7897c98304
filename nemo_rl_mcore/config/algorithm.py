"""Configurations of the loops that sample, and of the advantage estimators."""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, cast

from pydantic import BeforeValidator, model_validator

from nemo_rl_mcore.config.asynchronous import AsyncRolloutsConfig
from nemo_rl_mcore.config.base import (
    Float,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    Seed,
    StrictModel,
)
from nemo_rl_mcore.config.imports import Arguments, ImportPath


class AdvantageEstimatorConfig(StrictModel):
    """How rewards become advantages; a key is read only by the estimators it names."""

    name: Literal["grpo", "reinforce_plus_plus", "gae"] = "grpo"
    """The estimator: group-relative, REINFORCE++, or generalised advantage estimation with a critic."""
    type: ImportPath | None = None
    """A class of one's own in its place, `package.module:Name` (ours); of PPO it is given values, as gae is."""
    args: Arguments | None = None
    """Keyword arguments of that class (ours)."""
    use_leave_one_out_baseline: bool = True
    """grpo: the baseline of a sample is the mean of the other members of its group."""
    normalize_rewards: bool = True
    """grpo: divide by the standard deviation of the group."""
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

    read_unless = (("args", "type", None),)


class RewardScalingConfig(StrictModel):
    """A linear map of the reward from the source to the target interval; values outside are clamped."""

    enabled: bool = False
    """Whether rewards are mapped."""
    source_min: Float = 0.0
    """Reward that becomes target_min."""
    source_max: Float = 1.0
    """Reward that becomes target_max."""
    target_min: Float = 0.0
    """Lower end of the result."""
    target_max: Float = 1.0
    """Upper end of the result."""

    def problems(self) -> Iterator[Problem]:
        """Yield an empty source interval."""
        if self.enabled and self.source_max <= self.source_min:
            yield Problem(
                "too-small",
                "source_max",
                f"{self.source_max} is not above source_min: {self.source_min}",
                "give an interval with source_max > source_min",
                ("source_min",),
            )


class RewardShapingConfig(StrictModel):
    """The penalty for responses that come close to the maximum length (DAPO's soft overlong punishment)."""

    enabled: bool = False
    """Whether long responses are penalised."""
    overlong_buffer_length: PositiveInt = 128
    """Tokens before max_response_length over which the penalty grows from 0."""
    overlong_buffer_penalty: NonNegativeFloat = 1.0
    """Penalty at max_response_length."""
    max_response_length: PositiveInt | None = None
    """Response length with the full penalty; needed when enabled."""

    def problems(self) -> Iterator[Problem]:
        """Yield a missing length, or a buffer longer than the response."""
        if not self.enabled:
            return
        if self.max_response_length is None:
            yield Problem(
                "missing", "max_response_length", "is null with enabled: true", "set it", ("enabled",)
            )
        elif self.overlong_buffer_length > self.max_response_length:
            yield Problem(
                "too-large",
                "overlong_buffer_length",
                f"{self.overlong_buffer_length} is above max_response_length: {self.max_response_length}",
                "lower it",
                ("max_response_length",),
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
    seed: Seed | None = None
    """NeMo RL's other spelling of the top-level `seed`, which it gives where that is left out."""

    async_key: ClassVar[str] = ""
    """The key of asynchronous rollouts, where the algorithm can have them."""

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

    max_val_samples: PositiveInt | None = 64
    """Held-out prompts that a validation answers at most; null is all of data.validation, or of what is held out."""
    num_prompts_per_step: PositiveInt
    """Prompts drawn per step."""
    num_generations_per_prompt: PositiveInt
    """Responses sampled for each prompt; together they are one group."""
    overlong_filtering: bool = False
    """Leave responses that hit the maximum length without an end out of the loss."""
    use_dynamic_sampling: bool = False
    """Draw further prompts in place of groups whose rewards are all equal (DAPO)."""
    dynamic_sampling_max_gen_batches: PositiveInt = 10
    """Generation rounds after which a step of dynamic sampling gives up."""
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

    def problems(self) -> Iterator[Problem]:
        """Yield contradictions of dynamic sampling, and validations that answer the same several times."""
        if self.val_greedy and self.val_num_generations_per_prompt > 1:
            yield Problem(
                "incompatible",
                "val_num_generations_per_prompt",
                f"{self.val_num_generations_per_prompt} with val_greedy: true gives the same answer as often",
                "set val_greedy: false, or val_num_generations_per_prompt: 1",
                ("val_greedy",),
            )
        if self.use_dynamic_sampling and self.num_generations_per_prompt == 1:
            yield Problem(
                "no-signal",
                "use_dynamic_sampling",
                "true with num_generations_per_prompt: 1 drops every group (one reward has no variance)",
                "set num_generations_per_prompt to 2 or more, or use_dynamic_sampling: false",
                ("num_generations_per_prompt",),
            )


class EpisodesConfig(RolloutConfig):
    """The loop of algorithms that learn from episodes."""

    max_rollout_turns: PositiveInt = 1
    """Answers of an episode at most; the environment may end it before. One that it has not ended is truncated.

    An episode whose next answer may not fit into policy.max_total_sequence_length is, too."""


class GRPOConfig(EpisodesConfig):
    """The GRPO loop: how much is sampled per step, for how long, and how it is judged."""

    normalize_rewards: bool | None = None
    """Shorthand for adv_estimator.normalize_rewards, which is the value that is read."""
    use_leave_one_out_baseline: bool | None = None
    """Shorthand for adv_estimator.use_leave_one_out_baseline, which is the value that is read."""
    adv_estimator: AdvantageEstimatorConfig = AdvantageEstimatorConfig()
    """How rewards become advantages."""
    advantage_clip_low: Float | None = None
    """Advantages below this become it; null leaves them."""
    advantage_clip_high: Float | None = None
    """Advantages above this become it; null leaves them."""
    async_grpo: AsyncSection = AsyncRolloutsConfig()
    """Asynchronous rollouts: later steps are sampled while one trains."""

    async_key = "async_grpo"

    @model_validator(mode="before")
    @classmethod
    def _fill_estimator(cls, given: object) -> object:
        """Hand the shorthands on to an adv_estimator section that leaves them out."""
        if not isinstance(given, Mapping):
            return given
        section = dict(cast("Mapping[str, object]", given))
        estimator = section.get("adv_estimator", {})
        if not isinstance(estimator, Mapping):
            return section
        shorthands = {key: section[key] for key in _SHORTHANDS if section.get(key) is not None}
        section["adv_estimator"] = shorthands | dict(cast("Mapping[str, object]", estimator))
        return section

    def problems(self) -> Iterator[Problem]:
        """Yield contradictions between the loop, the estimator and dynamic sampling."""
        for key in _SHORTHANDS:
            short, read = getattr(self, key), getattr(self.adv_estimator, key)
            if short is not None and short != read:
                yield Problem(
                    "contradicts",
                    key,
                    f"{str(short).lower()} contradicts adv_estimator.{key}: {str(read).lower()}",
                    "give both the same value, or remove one",
                    (f"adv_estimator.{key}",),
                )
        low, high = self.advantage_clip_low, self.advantage_clip_high
        if low is not None and high is not None and low >= high:
            yield Problem(
                "too-large",
                "advantage_clip_low",
                f"{low:g} is not below advantage_clip_high: {high:g}, so that all advantages are one",
                "lower it",
                ("advantage_clip_high",),
            )
        if self.adv_estimator.name == "gae":
            yield Problem(
                "incompatible",
                "adv_estimator.name",
                "gae needs a critic, and GRPO has none",
                "set adv_estimator.name: grpo or reinforce_plus_plus",
            )
        if self._compares_nothing and not self.use_dynamic_sampling:
            yield Problem(
                "no-signal",
                "num_generations_per_prompt",
                "1 leaves a reward nothing to be compared with, so that every advantage is 0",
                "set it to 2 or more",
                ("adv_estimator.name",),
            )
        yield from super().problems()

    @property
    def _compares_nothing(self) -> bool:
        """Return whether the baseline of an answer is the answer's own reward."""
        name, minus = self.adv_estimator.name, self.adv_estimator.minus_baseline
        built_in = self.adv_estimator.type is None and (name == "grpo" or minus)
        return built_in and self.num_generations_per_prompt == 1


_SHORTHANDS = ("normalize_rewards", "use_leave_one_out_baseline")


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

    async_key = "async_ppo"

    def problems(self) -> Iterator[Problem]:
        """Yield an estimator without a critic, and what holds of every rollout."""
        yield from super().problems()
        if self.adv_estimator.name != "gae":
            yield Problem(
                "incompatible",
                "adv_estimator.name",
                f"{self.adv_estimator.name} leaves the critic of PPO without use",
                "set adv_estimator.name: gae",
            )


class DistillationConfig(RolloutConfig):
    """The distillation loop: answers of the student or of the data set, and what the teacher says of each token."""

    on_policy: bool = True
    """Learn from the student's own answers; false takes those of the data set."""
    topk_logits_k: PositiveInt | None = 64
    """Most probable tokens that the teacher names at each position; null is the whole vocabulary."""
    adv_estimator: AdvantageEstimatorConfig = AdvantageEstimatorConfig()
    """How rewards become advantages, where loss_fn.rl_weight is above 0."""
    async_distillation: AsyncSection = AsyncRolloutsConfig()
    """Asynchronous rollouts (ours): answers of later steps are sampled while one trains; on policy only."""

    async_key = "async_distillation"

    def problems(self) -> Iterator[Problem]:
        """Yield an estimator that needs a critic, and answers that nobody samples."""
        yield from super().problems()
        if self.adv_estimator.name == "gae":
            yield Problem(
                "incompatible",
                "adv_estimator.name",
                "gae needs a critic, and distillation has none",
                "set adv_estimator.name: grpo or reinforce_plus_plus",
            )
        if not self.on_policy and self.num_generations_per_prompt != 1:
            yield Problem(
                "incompatible",
                "num_generations_per_prompt",
                f"{self.num_generations_per_prompt} with on_policy: false, where each prompt has its one given answer",
                "set it to 1",
                ("on_policy",),
            )
