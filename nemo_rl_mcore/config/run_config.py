"""What the recipes of all algorithms have in common, and what follows from it."""

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
from nemo_rl_mcore.config.data import DataConfig, EnvConfig, RowKind
from nemo_rl_mcore.config.evaluation import EvalConfig
from nemo_rl_mcore.config.logger import LoggerConfig
from nemo_rl_mcore.config.loss import ClippedPGLossConfig, CustomLossConfig
from nemo_rl_mcore.config.megatron import OptimizationConfig, PeftConfig
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.policy import PolicyConfig, Role, StartWeightsConfig
from nemo_rl_mcore.config.source import SourceConfig, each, names_of, with_defaults

PLAIN = "with the values of the environment"
"""Serialization context under which a recipe shows what it took from the environment."""
_SHAPES = ("policy.model.", "teacher.model.", "value.model.")
"""Sizes of the weights, which the tensors next to the recipe show anyway, and which are read without the variable."""
HIDDEN_ANYWHERE = 4
"""Characters of a value from which on it is looked for in all text; a shorter one only where its key is judged."""


@dataclass(frozen=True)
class Reference:
    """A value that rests on the environment: as the recipe refers to it, and what it is now."""

    text: str
    value: object


References = Mapping[str, Reference]
"""References by the paths of their keys."""


def with_references(tree: Tree, references: References) -> Tree:
    """Return the tree of a configuration with references in place of values."""
    if not references:
        return tree
    # Keys may be filled from others, as a tokenizer from model_name: their values are known by the text.
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
    """A recipe that remembers what it took from the environment; its JSON has references in place of values."""

    _references: References = PrivateAttr(default_factory=dict[str, Reference])

    def refer(self, references: References) -> Self:
        """Keep what the recipe took from the environment, which is not to be written anywhere."""
        self._references = references
        return self

    @property
    def references(self) -> References:
        """Return what the recipe took from the environment, by the paths of its keys."""
        return self._references

    def plain(self) -> Tree:
        """Return the resolved recipe as JSON has it, with the values of the environment: to compare, not to write."""
        return self.model_dump(mode="json", context=PLAIN)

    @model_serializer(mode="wrap")
    def _refer_in_json(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> Tree:
        """Whoever writes a recipe writes the references."""
        tree = dump(self)
        refers = info.mode == "json" and info.context != PLAIN
        return with_references(tree, self._references) if refers else tree


@dataclass(frozen=True)
class ModelPlan:
    """One model of a run; it has ranks of its own.

    name: its section of the recipe and, if it is trained, its folder in a checkpoint.
    policy: the configuration of its workers, which has met the rules of a policy (those that concern a frozen one).
    reference: whether the weights of the start are kept beside it.
    own_keys: keys of the policy that the recipe sets elsewhere for this model, and where.
    """

    name: str
    policy: PolicyConfig
    role: Role = Role.POLICY
    trained: bool = True
    reference: bool = False
    own_keys: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def saved_in_background(self) -> bool:
        """Return whether its checkpoints are written in the background."""
        return self.trained and self.policy.megatron_cfg.checkpoint.async_save

    def key(self, path: str) -> str:
        """Return where the recipe sets for this model what `path`, such as policy.precision, is for the policy."""
        for shared, own in self.own_keys.items():
            if path == shared or path.startswith(f"{shared}."):
                return own + path.removeprefix(shared)
        return path


class ValueConfig(OptimizationConfig):
    """The critic: the policy's architecture and start weights, with a value head and an optimizer of its own."""

    max_grad_norm: NonNegativeFloat | None = None
    """The critic's gradients are scaled down to this norm; null is policy.max_grad_norm."""
    train_micro_batch_size: PositiveInt | None = None
    """Samples per forward and backward pass of one rank; null is policy.train_micro_batch_size."""

    def plan(self, policy: PolicyConfig) -> ModelPlan:
        """Return the critic beside a policy."""
        # It is trained whole, also beside a policy of adapters.
        of_megatron = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        own: dict[str, object] = {
            key: getattr(self, key)
            for key in ("max_grad_norm", "train_micro_batch_size")
            if getattr(self, key) is not None
        }
        megatron = policy.megatron_cfg.model_copy(update=of_megatron | {"peft": PeftConfig()})
        return ModelPlan(
            "value",
            policy.model_copy(update={"megatron_cfg": megatron, **own}),
            role=Role.VALUE,
            own_keys={f"policy.megatron_cfg.{key}": f"value.{key}" for key in of_megatron}
            | {f"policy.{key}": f"value.{key}" for key in own},
        )


class TeacherConfig(StartWeightsConfig):
    """The teacher: a frozen model with the policy's tokenizer, of the same size or another one."""

    model: ModelConfig | None = None
    """The teacher's architecture; null is policy.model."""

    def plan(self, policy: PolicyConfig) -> ModelPlan:
        """Return the teacher beside a policy."""
        # There is no backward pass to overlap with, and Megatron asks more of a model that would have one.
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
            lambda own: len(own.sources) != 1,
            ("model_name",),
            "set one of model_name and init_checkpoint",
            says=lambda own: f"one source of weights is needed; given: {' and '.join(own.sources) or 'none'}",
        ),
    )

    @property
    def sources(self) -> list[str]:
        """Return the keys that name weights."""
        return [key for key in ("model_name", "init_checkpoint") if getattr(self, key)]


_Tree = dict[str, object]

KEPT_BYTES = 10_000_000_000
"""Disk for the groups of finished steps, which `replay` trains on: the oldest go, none newer than the last checkpoint.

Without checkpoints the first steps are kept, and no more than that: a replay begins with them.
"""


class RunConfig(WithReferences):
    """Everything a run depends on, whatever its algorithm."""

    algorithm: ClassVar[str]
    """The name of the algorithm's section, and of its command."""

    seed: Seed = 42
    """Seed of the weights, the prompts and the sampling."""
    max_consecutive_skips: PositiveInt = 5
    """Optimizer steps skipped in a row, for a loss or gradient that is not finite, that end the run."""
    policy: PolicyConfig
    """The model that is trained."""
    data: DataConfig
    """The prompts."""
    env: EnvConfig = EnvConfig()
    """The environment that scores the answers."""
    eval: EvalConfig | None = None
    """Sets of prompts with known answers, to evaluate a model on (ours)."""
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    """When checkpoints are written."""
    logger: LoggerConfig = LoggerConfig()
    """What is recorded, and where."""
    cluster: ClusterConfig = ClusterConfig()
    """The machines."""
    input_digests: dict[str, str] | None = None
    """Digests of the data and of the user's code, by key; a run writes them into its saved recipe (ours)."""

    @property
    def loop(self) -> LoopConfig:
        """Return the algorithm's section."""
        return getattr(self, self.algorithm)

    @property
    def models(self) -> dict[str, ModelPlan]:
        """Return the models of the run by name, the policy first."""
        return {"policy": ModelPlan("policy", self.policy, reference=self.needs_reference)}

    @property
    def samples_per_step(self) -> int:
        """Return the number of samples that a step trains on; of DPO one is a pair."""
        loop = self.loop
        return (
            loop.samples_per_step if isinstance(loop, RolloutConfig) else self.policy.train_global_batch_size
        )

    @property
    def prompts_per_step(self) -> int:
        """Return the number of rows of the data set that a step takes; of dynamic sampling those that it trains on."""
        loop = self.loop
        return (
            loop.num_prompts_per_step
            if isinstance(loop, RolloutConfig)
            else self.policy.train_global_batch_size
        )

    @property
    def prompts_key(self) -> str:
        """Return the path of the key that says how many these are."""
        sampling = isinstance(self.loop, RolloutConfig)
        return f"{self.algorithm}.num_prompts_per_step" if sampling else "policy.train_global_batch_size"

    @property
    def generations_per_prompt(self) -> int:
        """Return the number of responses to a prompt, which are its group; 0 where the data set gives the answers."""
        loop = self.loop
        return loop.num_generations_per_prompt if isinstance(loop, RolloutConfig) else 0

    @property
    def max_rollout_turns(self) -> int:
        """Return the most answers of an episode."""
        loop = self.loop
        return (
            loop.max_rollout_turns if isinstance(loop, EpisodesConfig) and not self.scores_one_answer else 1
        )

    @property
    def scores_one_answer(self) -> bool:
        """Return whether the environment ends each episode with its first answer, as far as the recipe says."""
        if self.env.endpoint is not None:
            return False
        environment = next(iter(self.env.given), "arithmetic")
        return environment in ("arithmetic", "math", "rewards") and not self.data.has_turns

    @property
    def shows_chats(self) -> bool:
        """Return whether the chat template shows anything: rows, or what agents say."""
        return self.data.apply_chat_template or self.env.endpoint is not None

    @property
    def given_rows(self) -> GivenRowsConfig | None:
        """Return the loop where the data set gives the answers."""
        return self.loop if isinstance(self.loop, GivenRowsConfig) and not self.learns_from_samples else None

    @property
    def val_loss_samples(self) -> int | None:
        """Return the most held-out samples of which a validation takes the loss; None is all that there are."""
        if (loop := self.given_rows) is None:
            return 0
        if loop.val_batches == -1:
            return None
        samples = loop.val_batches * (loop.val_global_batch_size or self.policy.train_global_batch_size)
        return min(samples, self.data.validation_prompts) if self.data.embedded else samples

    @property
    def max_prompt_length(self) -> int:
        """Return the most tokens of a prompt."""
        left = self.policy.max_total_sequence_length - self.policy.reserved_tokens
        given = self.data.max_prompt_length or left
        return min(given, left) if self.policy.generation.fit_to_sequence else given

    @property
    def row_kind(self) -> RowKind:
        """Return what is read of a row of a file."""
        return RowKind.PROMPTS

    @property
    def import_paths(self) -> dict[str, str]:
        """Return the classes and functions of the user's own, by the key that names them."""
        named = {f"{name}.type": loss.type for name, loss in self.losses.items()} | {
            "data.type": self.data.type,
            "env.custom.type": self.env.custom.type if self.env.custom else None,
            f"{self.algorithm}.adv_estimator.type": self.loop.estimator_type,
            **{f"env.rewards.{name}": path for name, path in (self.env.rewards or {}).items()},
        }
        return {key: path for key, path in named.items() if path is not None}

    @property
    def losses(self) -> dict[str, CustomLossConfig]:
        """Return the losses whose place a class of the user's own can take, by the name of their section."""
        sections = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: loss for name, loss in sections.items() if isinstance(loss, CustomLossConfig)}

    @property
    def gradient_key(self) -> str:
        """Return the path of the policy-gradient loss; empty where there is none."""
        return ""

    @property
    def gradient(self) -> ClippedPGLossConfig | None:
        """Return that loss."""
        return cast("ClippedPGLossConfig", value_at(self, self.gradient_key)) if self.gradient_key else None

    def key(self, path: str) -> str:
        """Return the path in a recipe of what is here at `loop`, `asynchrony` or `gradient`, or below it."""
        places = {"loop": self.algorithm, "asynchrony": self.asynchrony_key, "gradient": self.gradient_key}
        first, dot, rest = path.partition(".")
        return f"{places.get(first, first)}{dot}{rest}"

    @property
    def asynchrony(self) -> AsyncRolloutsConfig:
        """Return the section of asynchronous rollouts; of an algorithm that has none, one that is off."""
        return getattr(self.loop, self.loop.async_key) if self.loop.async_key else AsyncRolloutsConfig()

    @property
    def asynchrony_key(self) -> str:
        """Return the path of that section."""
        return join_path(self.algorithm, self.loop.async_key)

    @property
    def age_key(self) -> str:
        """Return the path of the key of the largest staleness."""
        return f"{self.asynchrony_key}.max_trajectory_age_steps"

    @property
    def asynchronous(self) -> bool:
        """Return whether later steps are sampled while one trains."""
        return self.asynchrony.enabled

    @property
    def max_age(self) -> int:
        """Training steps that a group may be older than the weights it trains."""
        return self.asynchrony.max_trajectory_age_steps if self.asynchronous else 0

    @property
    def max_live_groups(self) -> int:
        """Return the number of groups that are being answered, wait, or are trained on, all together."""
        return (self.max_age + 1) * self.prompts_per_step

    @property
    def max_inflight_groups(self) -> int:
        """Return the most groups that are being answered."""
        return min(self.asynchrony.max_inflight_prompts or self.max_live_groups, self.max_live_groups)

    @property
    def min_groups_per_chunk(self) -> int:
        """Return the number of groups for which a step waits before it trains on them; its last chunk may be fewer."""
        groups, asked = self.prompts_per_step, self.asynchrony.min_groups_for_streaming_train
        return min(asked or groups, groups) if self.asynchronous else groups

    @property
    def streams(self) -> bool:
        """Return whether a step trains on some of its groups before the others are there."""
        return self.min_groups_per_chunk < self.prompts_per_step

    @property
    def keeps_groups(self) -> bool:
        """Return whether the groups of finished steps are written down, KEPT_BYTES of them at most."""
        return self.asynchronous

    @property
    def redoes_steps(self) -> bool:
        """Return whether steps that no checkpoint holds are trained again when ranks are lost."""
        return self.checkpointing.enabled and self.cluster.max_trainer_restarts > 0

    @property
    def needs_reference(self) -> bool:
        """Return whether the log-probabilities of the weights at the start are needed."""
        return False

    @property
    def learns_from_samples(self) -> bool:
        """Return whether the answers that are trained on were sampled by the policy; else the data set gives them."""
        return True

    @property
    def logprob_temperature(self) -> float:
        """Return what divides the logits in every pass of the run: policy, reference, teacher, loss.

        Where the policy sampled the answers it is the sampling temperature, since they are from that distribution.
        """
        return self.policy.generation.temperature if self.learns_from_samples else 1.0

    @property
    def rows_per_sample(self) -> int:
        """Return the number of rows of a batch that make a sample, which is what batch sizes count."""
        return 1

    @property
    def data_parallel_size(self) -> int:
        """Return the number of copies of the model."""
        return max(1, self.cluster.world_size // self.policy.megatron_cfg.model_parallel_size)

    @property
    def train_sources(self) -> dict[str, SourceConfig]:
        """Return the sources to train on, by their path in the recipe."""
        return {join_path("data", path): source for path, source in self.data.train_sources.items()}

    @property
    def source_weights(self) -> dict[str, float] | None:
        """Return the weights of the sources to train on by their names; None where their rows are joined."""
        sources = self.train_sources
        given = {name: sources[path].weight for path, name in names_of(sources).items()}
        return {name: weight for name, weight in given.items() if weight is not None} or None

    @property
    def validation_sources(self) -> dict[str, SourceConfig]:
        """Return the sources to validate with, by their path in the recipe; names of eval.sets are those sets."""
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
        """Hand data.default on to the sets of eval."""
        if not isinstance(given, Mapping):
            return given
        section = dict(cast("Mapping[str, object]", given))
        evaluation, data = section.get("eval"), section.get("data")
        sets = cast("_Tree", evaluation).get("sets") if isinstance(evaluation, dict) else None
        if isinstance(sets, dict) and isinstance(data, dict):
            default = cast("_Tree", data).get("default")
            filled = {name: with_defaults(one, default) for name, one in cast("_Tree", sets).items()}
            section["eval"] = {**cast("_Tree", evaluation), "sets": filled}
        return section
