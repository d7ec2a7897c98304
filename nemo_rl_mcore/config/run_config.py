"""Sections shared by the recipes of all algorithms, and values derived from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self, cast

from pydantic import (
    PrivateAttr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from nemo_rl_mcore.config.algorithm import (
    AsyncRolloutsConfig,
    EpisodesConfig,
    GivenRowsConfig,
    LoopConfig,
    RolloutConfig,
)
from nemo_rl_mcore.config.base import (
    NonNegativeFloat,
    PositiveInt,
    Rule,
    Seed,
    StrictModel,
    Tree,
    absolute_path,
    join_path,
    value_at,
)
from nemo_rl_mcore.config.cluster import CheckpointingConfig, ClusterConfig
from nemo_rl_mcore.config.data import TURN_TASKS, DataConfig, EnvConfig, RowKind
from nemo_rl_mcore.config.evaluation import EvalConfig
from nemo_rl_mcore.config.generation import LogprobSampling
from nemo_rl_mcore.config.logger import LoggerConfig
from nemo_rl_mcore.config.loss import ClippedPGLossConfig, CustomLossConfig, DistillationLossConfig
from nemo_rl_mcore.config.megatron import OptimizationConfig, PeftConfig
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.policy import PolicyConfig, Role, RouterReplayConfig, StartWeightsConfig
from nemo_rl_mcore.config.source import SourceConfig, each, names_of, with_defaults

PLAIN = "with the values of the environment"
"""Serialization context in which a recipe includes values from the environment."""
_SHAPES = ("policy.model.", "teacher.model.", "value.model.")
"""Sections of weight sizes: a checkpoint's tensors reveal them, and they must be readable without the variable."""
HIDDEN_ANYWHERE = 4
"""Minimum length of values that are hidden in all text; shorter values are hidden only in their own keys' problems."""


@dataclass(frozen=True)
class Reference:
    """A value that depends on the environment: its text in the recipe, and its current value."""

    text: str
    value: object


References = Mapping[str, Reference]
"""References by key path."""


def with_references(tree: Tree, references: References) -> Tree:
    """Return a configuration's tree with references in place of values."""
    if not references:
        return tree
    # Some keys are filled from others, as a tokenizer from model_name: such copies are recognised by their text.
    copies: dict[str, Reference] = {}
    for reference in references.values():
        if isinstance(reference.value, str) and len(reference.value) >= HIDDEN_ANYWHERE:
            copies |= {reference.value: reference, absolute_path(reference.value): reference}

    def written(node: object, path: str) -> object:
        reference = references.get(path) or (copies.get(node) if isinstance(node, str) else None)
        if reference is not None and node is not None and not path.startswith(_SHAPES):
            return reference.text
        if isinstance(node, dict):
            return {key: written(one, join_path(path, key)) for key, one in cast("Tree", node).items()}
        if isinstance(node, list):
            places = enumerate(cast("list[object]", node))
            return [written(one, join_path(path, str(place))) for place, one in places]
        return node

    return cast("Tree", written(tree, ""))


class WithReferences(StrictModel):
    """A recipe that remembers which values came from the environment, and writes references for them to JSON."""

    algorithm: ClassVar[str]
    """Name of the algorithm's section and command."""
    rows_per_sample: ClassVar[int] = 1
    """Batch rows per sample; batch sizes count samples."""

    input_digests: dict[str, str] | None = None
    """Digests of data and user code by key, written by a run into its saved recipe; null in any other recipe (ours)."""
    _references: References = PrivateAttr(default_factory=dict[str, Reference])

    def refer(self, references: References) -> Self:
        """Remember the values from the environment, which must not be written anywhere."""
        self._references = references
        return self

    @property
    def references(self) -> References:
        """Return the references to the environment by key path."""
        return self._references

    def plain(self) -> Tree:
        """Return the resolved recipe as a JSON tree with values from the environment: for comparison, not output."""
        return self.model_dump(mode="json", context=PLAIN)

    @model_serializer(mode="wrap")
    def _refer_in_json(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> Tree:
        """Put references in place of values from the environment."""
        tree = dump(self)
        if "input_digests" in tree:
            tree["input_digests"] = tree.pop("input_digests")  # after the sections
        refers = info.mode == "json" and info.context != PLAIN
        return with_references(tree, self._references) if refers else tree


@dataclass(frozen=True)
class ModelPlan:
    """A model of a run, which has its own ranks.

    name: the model's section in the recipe and, if it is trained, its folder in a checkpoint.
    policy: the workers' configuration, checked by the rules that apply to a trained or frozen model.
    reference: true if a copy of the initial weights is kept.
    own_keys: policy keys that have another path for this model, with those paths.
    """

    name: str
    policy: PolicyConfig
    role: Role = Role.POLICY
    trained: bool = True
    reference: bool = False
    own_keys: Mapping[str, str] = field(default_factory=dict[str, str])

    def key(self, path: str) -> str:
        """Return the recipe path of this model's counterpart to a policy key, such as policy.precision."""
        for shared, own in self.own_keys.items():
            if path == shared or path.startswith(f"{shared}."):
                return own + path.removeprefix(shared)
        return path


class ValueConfig(OptimizationConfig):
    """The critic: the policy's architecture and initial weights, with a value head and its own optimizer."""

    max_grad_norm: NonNegativeFloat | None = None
    """Maximum norm of the critic's gradients; null means policy.max_grad_norm."""
    train_micro_batch_size: PositiveInt | None = None
    """Samples per forward and backward pass on one rank; null means policy.train_micro_batch_size."""

    def plan(self, policy: PolicyConfig) -> ModelPlan:
        """Return the plan of the critic for a policy."""
        # All of the critic's weights are trained, even if the policy trains adapters only.
        of_megatron = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        own: dict[str, object] = {
            key: getattr(self, key)
            for key in ("max_grad_norm", "train_micro_batch_size")
            if getattr(self, key) is not None
        }
        megatron = policy.megatron_cfg.model_copy(update=of_megatron | {"peft": PeftConfig()})
        return ModelPlan(
            "value",
            policy.model_copy(
                update={"megatron_cfg": megatron, "router_replay": RouterReplayConfig(), **own}
            ),
            role=Role.VALUE,
            own_keys={f"policy.megatron_cfg.{key}": f"value.{key}" for key in of_megatron}
            | {f"policy.{key}": f"value.{key}" for key in own},
        )


class TeacherConfig(StartWeightsConfig):
    """The teacher: a frozen model of any size that uses the policy's tokenizer."""

    model: ModelConfig | None = None
    """The teacher's architecture; null means policy.model."""

    def plan(self, policy: PolicyConfig) -> ModelPlan:
        """Return the plan of the teacher for a policy."""
        # A frozen model has no backward pass to overlap with, and Megatron restricts models that overlap.
        of_teacher = {"overlap_moe_expert_parallel_comm": False, "peft": PeftConfig()}
        megatron = policy.megatron_cfg.model_copy(update=of_teacher)
        of_weights = ("model_name", "hf_config_overrides", "init_checkpoint")
        own: dict[str, object] = {key: getattr(self, key) for key in of_weights}
        if self.model is not None:
            own["model"] = self.model
        return ModelPlan(
            "teacher",
            policy.model_copy(update={"megatron_cfg": megatron, **own}),
            trained=False,
            own_keys={f"policy.{key}": f"teacher.{key}" for key in own},
        )

    rules = (
        Rule(
            "one-of",
            "init_checkpoint",
            lambda own: bool(own.model_name) == bool(own.init_checkpoint),
            ("model_name",),
            "set one of model_name and init_checkpoint",
            says=lambda own: (
                "exactly one source of weights is needed; given: "
                + ("model_name and init_checkpoint" if own.model_name else "none")
            ),
        ),
    )


@dataclass(frozen=True)
class GroupLimits:
    """Numbers of groups; a group is the set of answers to one prompt.

    live: maximum in answering, waiting and training together. in_flight: maximum in answering. per_chunk: size of a
    step's training chunks, of which the last may be smaller.
    """

    live: int
    in_flight: int
    per_chunk: int


KEPT_BYTES = 10_000_000_000
"""Disk space for finished steps' groups, used by `replay`: the oldest are deleted, none newer than the last checkpoint.

Without checkpoints only the first steps are kept, since a replay begins with them.
"""


class RunConfig(WithReferences):
    """A run's full configuration, for any algorithm."""

    seed: Seed = 42
    """Seed for initial weights, prompt order and sampling."""
    max_consecutive_skips: PositiveInt = 5
    """Maximum consecutive optimizer steps skipped because the loss or gradient is not finite; then the run ends."""
    policy: PolicyConfig
    """The model that is trained."""
    data: DataConfig
    """The prompts."""
    env: EnvConfig = EnvConfig()
    """The environment that scores the answers."""
    eval: EvalConfig | None = None
    """Sets of prompts with known answers for evaluations; null means none (ours)."""
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    """Checkpoints: folder, interval, and number to keep."""
    logger: LoggerConfig = LoggerConfig()
    """Files and services that record the run."""
    cluster: ClusterConfig = ClusterConfig()
    """The machines and their ranks."""

    @property
    def loop(self) -> LoopConfig:
        """Return the algorithm's section."""
        return getattr(self, self.algorithm)

    @property
    def models(self) -> dict[str, ModelPlan]:
        """Return the run's models by name, the policy first."""
        loss = self.gradient
        has_penalty = loss is not None and loss.reference_policy_kl_penalty != 0
        reference = self.algorithm == "dpo" or has_penalty
        plans = {"policy": ModelPlan("policy", self.policy, reference=reference)}
        for name in ("value", "teacher"):
            if isinstance(section := getattr(self, name, None), ValueConfig | TeacherConfig):
                plans[name] = section.plan(self.policy)
        return plans

    @property
    def in_process(self) -> bool:
        """True if the run's only rank is in the driver's process, and the run starts no other process."""
        one_rank = self.cluster.world_size == 1 and len(self.models) == 1
        others = self.cluster.max_trainer_restarts or self.env.pool_size or self.env.endpoint is not None
        on_rank = self.policy.generation.decodes_on_ranks
        return self.cluster.in_process == "auto" and one_rank and on_rank and not others

    @property
    def prompts_key(self) -> str:
        """Return the path of the key that sets the number of data rows per step."""
        sampling = isinstance(self.loop, RolloutConfig)
        return f"{self.algorithm}.num_prompts_per_step" if sampling else "policy.train_global_batch_size"

    @property
    def prompts_per_step(self) -> int:
        """Return the number of data rows per step; with dynamic sampling, the number that a step trains on."""
        return cast("int", value_at(self, self.prompts_key))

    @property
    def samples_per_step(self) -> int:
        """Return the number of samples that a step trains on; for DPO a sample is a pair."""
        per_prompt = self.loop.num_generations_per_prompt if isinstance(self.loop, RolloutConfig) else 1
        return self.prompts_per_step * per_prompt

    @property
    def generations_per_prompt(self) -> int:
        """Return the number of responses in a prompt's group; 0 if the data set contains the answers."""
        given = value_at(self.loop, "on_policy") is False
        return 0 if given else cast("int", value_at(self.loop, "num_generations_per_prompt") or 0)

    @property
    def row_kind(self) -> RowKind:
        """Return the part of a data row that is read."""
        given = RowKind.PAIRS if self.algorithm == "dpo" else RowKind.ANSWERS
        return RowKind.PROMPTS if self.generations_per_prompt else given

    @property
    def max_rollout_turns(self) -> int:
        """Return the maximum answers per episode; 1 if the environment surely ends an episode after one answer."""
        if not isinstance(self.loop, EpisodesConfig):
            return 1
        once = not {*self.env.given} - {"math", "rewards"} and self.data.dataset_name not in TURN_TASKS
        return 1 if once and self.env.endpoint is None else self.loop.max_rollout_turns

    @property
    def val_loss_samples(self) -> int | None:
        """Return the maximum number of held-out samples in a validation loss; None means all of them."""
        loop = self.loop
        if not isinstance(loop, GivenRowsConfig) or self.generations_per_prompt:
            return 0
        if loop.val_batches == -1:
            return None
        samples = loop.val_batches * (loop.val_global_batch_size or self.policy.train_global_batch_size)
        return min(samples, self.data.task.validation_prompts) if self.data.embedded else samples

    @property
    def max_prompt_length(self) -> int:
        """Return the maximum number of tokens in a prompt."""
        left = self.policy.max_total_sequence_length - self.policy.reserved_tokens
        given = self.data.max_prompt_length or left
        return min(given, left) if self.policy.generation.fit_to_sequence else given

    @property
    def import_paths(self) -> dict[str, str]:
        """Return the import paths of the user's classes and functions, by the key that names them."""
        named = {f"{name}.type": loss.type for name, loss in self.losses.items()} | {
            "data.type": self.data.type,
            "env.custom.type": self.env.custom.type if self.env.custom else None,
            f"{self.algorithm}.adv_estimator.type": cast(
                "str | None", value_at(self.loop, "adv_estimator.type")
            ),
            **{f"env.rewards.{name}": path for name, path in (self.env.rewards or {}).items()},
        }
        return {key: path for key, path in named.items() if path is not None}

    @property
    def losses(self) -> dict[str, CustomLossConfig]:
        """Return the loss sections that a class of the user's own can replace, by name."""
        sections = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: loss for name, loss in sections.items() if isinstance(loss, CustomLossConfig)}

    @property
    def gradient(self) -> ClippedPGLossConfig | None:
        """Return the policy-gradient loss, alone or combined with a divergence; None if the run has none."""
        loss = getattr(self, "loss_fn", None)
        if isinstance(loss, DistillationLossConfig):
            return loss.rl if loss.rl_weight else None
        return loss if isinstance(loss, ClippedPGLossConfig) else None

    def key(self, path: str) -> str:
        """Return the recipe path for a path that begins with `loop`, `asynchrony` or `gradient`."""
        asynchrony = next((name for name in type(self.loop).model_fields if name.startswith("async_")), "")
        places = {
            "loop": self.algorithm,
            "asynchrony": join_path(self.algorithm, asynchrony),
            "gradient": "loss_fn.rl" if self.algorithm == "distillation" else "loss_fn",
        }
        first, dot, rest = path.partition(".")
        return f"{places.get(first, first)}{dot}{rest}"

    @property
    def asynchrony(self) -> AsyncRolloutsConfig:
        """Return the section for asynchronous rollouts; a disabled one for an algorithm without such a section."""
        section = value_at(self, self.key("asynchrony"))
        return section if isinstance(section, AsyncRolloutsConfig) else AsyncRolloutsConfig()

    @property
    def asynchronous(self) -> bool:
        """True if later steps are sampled while a step trains."""
        return self.asynchrony.enabled

    @property
    def max_age(self) -> int:
        """Return the maximum age of a group, in training steps, relative to the weights that it trains."""
        return self.asynchrony.max_trajectory_age_steps if self.asynchronous else 0

    @property
    def group_limits(self) -> GroupLimits:
        """Return the limits on groups in a step's training, and at a time."""
        per_step, section = self.prompts_per_step, self.asynchrony
        live = (self.max_age + 1) * per_step
        in_flight = min(section.max_inflight_prompts or live, live)
        per_chunk = per_step
        if section.enabled and section.min_groups_for_streaming_train is not None:
            per_chunk = min(section.min_groups_for_streaming_train, per_step)
        return GroupLimits(live, in_flight, per_chunk)

    @property
    def streams(self) -> bool:
        """True if a step trains on some of its groups before the others are ready."""
        return self.group_limits.per_chunk < self.prompts_per_step

    @property
    def logprob_temperature(self) -> float | None:
        """Return the temperature of every pass; None for a policy gradient, which uses that of sampling."""
        if self.gradient is not None:
            return None
        return self.policy.generation.temperature if self.generations_per_prompt else 1.0

    @property
    def logprob_sampling(self) -> LogprobSampling:
        """Return the distribution of the policy's own log-probabilities."""
        temperature = self.logprob_temperature
        return (
            self.policy.generation.logprob_sampling if temperature is None else LogprobSampling(temperature)
        )

    @property
    def data_parallel_size(self) -> int:
        """Return the number of copies of the model."""
        return max(1, self.cluster.world_size // self.policy.megatron_cfg.model_parallel_size)

    @property
    def train_sources(self) -> dict[str, SourceConfig]:
        """Return the training sources by their path in the recipe."""
        sources = each(self.data.train).items()
        return {join_path("data.train", place): cast("SourceConfig", one) for place, one in sources}

    @property
    def source_weights(self) -> dict[str, float] | None:
        """Return the training sources' weights by name; None if their rows are joined."""
        sources = self.train_sources
        given = {name: sources[path].weight for path, name in names_of(sources).items()}
        return {name: weight for name, weight in given.items() if weight is not None} or None

    @property
    def validation_sources(self) -> dict[str, SourceConfig]:
        """Return the validation sources by their path in the recipe; names refer to sets in eval.sets."""
        sets = self.eval.sets if self.eval else {}
        found = dict[str, SourceConfig]()
        for place, one in each(self.data.validation).items():
            if isinstance(one, SourceConfig):
                found[join_path("data.validation", place)] = one
            elif one in sets:
                found[f"eval.sets.{one}"] = sets[cast("str", one)]
        return found

    @model_validator(mode="before")
    @classmethod
    def _fill_sets(cls, given: object) -> object:
        """Fill missing keys of eval.sets from data.default, and drop sets that are null."""
        if not isinstance(given, Mapping):
            return given
        section = dict(cast("Mapping[str, object]", given))
        evaluation, data = section.get("eval"), section.get("data")
        sets = cast("Tree", evaluation).get("sets") if isinstance(evaluation, dict) else None
        if isinstance(sets, dict):
            default = cast("Tree", data).get("default") if isinstance(data, dict) else None
            given_sets = {name: one for name, one in cast("Tree", sets).items() if one is not None}
            filled = {name: with_defaults(one, default) for name, one in given_sets.items()}
            section["eval"] = {**cast("Tree", evaluation), "sets": filled}
        return section
