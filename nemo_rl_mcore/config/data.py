"""Configurations of the prompts, and of the environment that scores answers."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal, cast

from pydantic import Field, model_validator

from nemo_rl_mcore.config.base import Float, PositiveInt, Rule, StrictModel, join_path
from nemo_rl_mcore.config.custom_code import Arguments, ImportPath, OwnClassConfig
from nemo_rl_mcore.config.environment import AnswerConfig, EndpointConfig, EnvPoolConfig
from nemo_rl_mcore.config.source import (
    SourceConfig,
    SourceDefaults,
    Sources,
    SourcesOrNames,
    as_in_train,
    each,
    with_defaults,
)

TURN_TASKS = ("guess_number", "calculator")
"""Embedded tasks with several turns; each task's environment has the same name."""
ENVIRONMENTS = (*TURN_TASKS, "math", "rewards", "custom")
"""The environment sections of `env`, of which a run has at most one."""

GIVEN_TO_REWARDS = ("prompts", "responses", "answers", "finished")
"""Parameters that a function in env.rewards may have besides data columns."""
SAME_AS_GIVEN = {
    "completions": "responses",
    "prompt": "prompts",
    "answer": "answers",
    "ground_truth": "answers",
}
"""Other trainers' names for these parameters."""


class RowKind(Enum):
    """The part of a data row that an algorithm reads."""

    PROMPTS = "a prompt and the answer to score against"
    ANSWERS = "an answer to imitate: prompt and answer, or a conversation"
    PAIRS = "a prompt, a better answer and a worse one"


_READERS = {
    "train": ("files", "set train: {data_path: train.jsonl}"),
    "default": ("files", ""),
    "validation": ("files", ""),
    "shuffle": ("files", ""),
    "type": ("custom", "set type: my_pkg.my_mod:MyData"),
    "args": ("custom", ""),
}
"""Keys that only one dataset_name reads, with an example for each key that it requires."""


def _reader_rules(data: "DataConfig") -> "Iterator[Rule[DataConfig]]":
    """Yield rules for keys that dataset_name does not read, and for missing keys that it requires."""
    for key, (reader, example) in _READERS.items():
        given = getattr(data, key) not in (DataConfig.model_fields[key].default, {})
        if key == "default" and data.dataset_name in TURN_TASKS:
            continue  # tasks with several turns read it, too
        if given and data.dataset_name != reader:
            fix = f"remove it, or set dataset_name: {reader}"
            yield Rule("incompatible", key, True, ("dataset_name",), fix)
        elif example and not given and data.dataset_name == reader:
            yield Rule("missing", key, True, ("dataset_name",), example)


def _weight_rules(data: "DataConfig") -> "Iterator[Rule[DataConfig]]":
    """Yield rules for weights where other sources have none."""
    sources = cast("dict[str, SourceConfig]", each(data.train))
    weights = {join_path("train", place): source.weight for place, source in sources.items()}
    given = [weight for weight in weights.values() if weight is not None]
    for path, weight in weights.items():
        fix = "give all sources a weight, or none"
        yield Rule(
            "missing", f"{path}.weight", bool(given) and weight is None, fix=fix, why="other sources have one"
        )
        alone = weight is not None and len(weights) == 1
        yield Rule("has-no-effect", f"{path}.weight", alone, why="there is one source")
    for place, source in each(data.validation).items():
        path, why = join_path("validation", place), "a validation takes equally many rows from each source"
        weighs = isinstance(source, SourceConfig) and source.weight is not None
        yield Rule("has-no-effect", f"{path}.weight", weighs, why=why)


@dataclass(frozen=True)
class EmbeddedTask:
    """An embedded task's tokens per prompt, and lower bounds on its distinct prompts, since a hash splits them."""

    prompt_length: int
    train_prompts: int
    validation_prompts: int


class DataConfig(OwnClassConfig):
    """The prompts: an embedded task over strings of digits, sources of data rows, or a class of your own."""

    dataset_name: Literal[
        "copy", "reverse", "sort", "increment", "guess_number", "calculator", "files", "custom"
    ]
    """Embedded task (answer with the digits unchanged, reversed, sorted, or each incremented), files, or custom.

    Tasks with several turns: guess_number, find a number between two bounds; calculator, add two numbers with a tool.
    If omitted, it is inferred from data.train or data.type; jsonl is an older name for files."""
    num_digits: Annotated[int, Field(ge=1, le=9)] = 3
    """Number of digits in an embedded task's prompt, which also has a final `>` and, for calculator, a `+`."""
    max_input_seq_length: PositiveInt | None = None
    """Maximum prompt tokens; null means an embedded task's length, or all tokens not reserved for the response."""
    default: SourceDefaults | None = None
    """Default keys for all sources; its prompt texts also apply to embedded multi-turn tasks. Null sets no defaults."""
    train: Sources | None = None
    """Training rows of files, as a source or a list of sources; null for any other dataset_name."""
    validation: SourcesOrNames | None = None
    """Validation rows of files, as in data.train or as names in eval.sets; null holds out a share of data.train.

    If both are sections, missing keys are taken from data.train."""
    shuffle: bool = True
    """Reshuffle the rows of files for each pass; false keeps their order."""
    apply_chat_template: bool = False
    """Format prompts with the tokenizer's chat template; false uses plain text (ours)."""
    add_bos: bool = False
    """Add the beginning-of-sequence token to prompts whose template or text does not include it."""
    add_eos: bool = False
    """Add the end-of-sequence token to given conversations (SFT, DPO) whose chat template does not add it; plain text
    always ends with it."""
    imitated: Literal["answer", "to_turn_end", "turn"] = "answer"
    """Part of each assistant turn to train on in given conversations (ours): the answer and its end of sequence
    (answer), also the template's text after it (to_turn_end), or the whole turn (turn)."""
    special_tokens_in_content: Literal["text", "parse"] | None = None
    """Read special tokens spelled out in data rows, such as `<|im_end|>`, as plain characters (text) or as special
    tokens, which may end a turn (parse); null refuses data with such rows (ours). Environment output is text unless
    this is parse; prompt files, system prompts and chat templates are always parsed."""
    overlong: Literal["error", "drop"] = "error"
    """Handling of data rows with too many tokens: error ends the run, drop leaves the row out (ours)."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: object) -> object:
        """Derive dataset_name from the other keys, and fill the sources' missing keys from `default`."""
        if not isinstance(given, Mapping):
            return given
        section = dict(cast("Mapping[str, object]", given))
        if section.get("dataset_name") == "jsonl":
            section["dataset_name"] = "files"
        if "dataset_name" not in section:
            for key, name in (("train", "files"), ("type", "custom")):
                if section.get(key) is not None:
                    section["dataset_name"] = name
        train, validation = section.get("train"), section.get("validation")
        if isinstance(train, Mapping) and isinstance(validation, Mapping):
            section["validation"] = as_in_train(
                cast("Mapping[str, object]", validation), cast("Mapping[str, object]", train)
            )
        for key in ("train", "validation"):
            if key in section:
                section[key] = with_defaults(section[key], section.get("default"))
        return section

    @property
    def embedded(self) -> bool:
        """True if the prompts come from an embedded task."""
        return self.dataset_name not in ("files", "custom")

    @property
    def task(self) -> EmbeddedTask:
        """Return the sizes of the embedded task."""
        prompts = 10**self.num_digits
        if self.dataset_name == "guess_number":  # a prompt for each number between each pair of bounds
            bounds = 10 ** (self.num_digits // 2)
            prompts = bounds * (bounds + 1) * (bounds + 2) // 6 - bounds
        return EmbeddedTask(
            # The digits, the final `>` and, for calculator, a sign.
            prompt_length=self.num_digits + 1 + (self.dataset_name == "calculator"),
            train_prompts=87 * prompts // 100,
            validation_prompts=9 * prompts // 100,
        )

    @property
    def max_prompt_length(self) -> int | None:
        """Return the tokens to reserve for the prompt; None if it gets all tokens not reserved for the response."""
        has_text_around = self.apply_chat_template or self.default is not None
        if self.max_input_seq_length is None and self.embedded and not has_text_around:
            return self.task.prompt_length
        return self.max_input_seq_length

    read_unless = ()

    rules = (
        _reader_rules,
        _weight_rules,
        Rule(
            "not-divisible",
            "num_digits",
            lambda own: own.dataset_name in TURN_TASKS and own.num_digits % 2,
            ("dataset_name",),
            "make it even",
            says=lambda own: (
                f"{own.num_digits} is odd, but data.dataset_name: {own.dataset_name} needs two numbers with the same "
                "number of digits"
            ),
        ),
        Rule(
            "incompatible",
            "apply_chat_template",
            lambda own: own.embedded and own.dataset_name not in TURN_TASKS and own.apply_chat_template,
            ("dataset_name",),
            "set it to false, or use conversations in data.train",
            "its prompts are not conversations",
        ),
        Rule(
            "too-small",
            "max_input_seq_length",
            lambda own: own.embedded and (own.max_input_seq_length or math.inf) < own.task.prompt_length,
            ("num_digits",),
            lambda own: f"set it to {own.task.prompt_length} or more, or lower num_digits",
            lambda own: f"prompts of {own.dataset_name} have {own.task.prompt_length} tokens",
        ),
    )


class GuessNumberEnvConfig(StrictModel):
    """The environment of guess_number: it replies `h>` (higher) or `l>` (lower) to each wrong guess."""


class CalculatorEnvConfig(StrictModel):
    """The environment of calculator: it replies to a sum with its value; a number ends the episode."""


SCORE_WITHIN_S = 5
"""Time limit for parsing an expression and for comparing two; a response that exceeds it is scored as wrong."""


class MathEnvConfig(StrictModel):
    """Reward 1 for a response whose final answer equals the reference in `math-verify`, else 0."""

    gold: AnswerConfig | None = None
    """Location of the reference answer within the data's answer; null means the whole text (ours)."""
    response: AnswerConfig | None = None
    """Location of the answer within a response; null lets math-verify find it, preferably in a box (ours)."""
    unparsable: Literal["refuse", "drop", "zero"] = "refuse"
    """Handling of reference answers that math-verify cannot parse: refuse ends the run before it starts; drop leaves
    the row out; zero scores every response 0, as NeMo RL does (ours). `eval` scores dropped rows 0."""


class CustomEnvConfig(OwnClassConfig):
    """A class of your own."""

    read_unless = ()

    rules = (Rule("missing", "type", lambda own: own.type is None, fix="set it: package.module:Name"),)


class EnvConfig(StrictModel):
    """The environment that scores the answers, chosen by its section; one of several by the rows' `env_name`.

    Without a section, an embedded task's reward is the share of correct characters, end-of-sequence included.
    """

    guess_number: GuessNumberEnvConfig | None = None
    """The embedded number-guessing game, which has several turns; null if not used (ours)."""
    calculator: CalculatorEnvConfig | None = None
    """The embedded calculator tool, which has several turns; null if not used (ours)."""
    math: MathEnvConfig | None = None
    """Scoring of mathematical expressions; requires the extra math. Null if not used."""
    rewards: dict[str, ImportPath] | None = None
    """Your reward functions by name, such as `right: my_pkg.rewards:right`; an answer's reward is their sum, weighted
    by reward_weights. Null if not used (ours)."""
    custom: CustomEnvConfig | None = None
    """An environment class of your own; null if not used (ours)."""
    reward_weights: dict[str, Float] | None = None
    """Weights by name for the rewards of env.rewards or env.custom; missing and null mean 1 (ours)."""
    unscored: Literal["refuse", "drop"] = "refuse"
    """Handling of answers whose reward is None (ours): refuse ends the run; drop excludes the answer from baselines,
    standard deviations, the loss and validations, and counts it in `episodes/unscored_rate`."""
    pool: EnvPoolConfig = EnvPoolConfig()
    """The processes of each environment (ours)."""
    endpoint: EndpointConfig | None = None
    """Agents that play the episodes, each in its own process; the environment, if any, scores episodes that end without
    a reward. Null means no agents (ours)."""
    nemo_gym: Arguments | None = None
    """NeMo Gym's own configuration: config_paths and any further keys. Gym's agents play the episodes and return the
    rewards; each data row has Gym's responses_create_params and agent_ref. Null if not used."""

    @model_validator(mode="before")
    @classmethod
    def _open_endpoint(cls, given: object) -> object:
        """Add a default endpoint for NeMo Gym's agents if the recipe has none."""
        if not isinstance(given, Mapping):
            return given
        section = dict(cast("Mapping[str, object]", given))
        if section.get("nemo_gym") is not None and section.get("endpoint") is None:
            section["endpoint"] = {}
        return section

    @property
    def pool_size(self) -> int:
        """Return the number of environment processes; 0 if the environment runs in the loop's process."""
        if self.pool.size is not None:
            return self.pool.size
        return 1 if self.math or self.custom or self.rewards else 0

    @property
    def given(self) -> list[str]:
        """Return the names of the environments that have a section."""
        return [name for name in ENVIRONMENTS if getattr(self, name) is not None]

    @property
    def by_name(self) -> "dict[str, EnvConfig]":
        """Return a section for each environment by its name, which is empty if there is only one."""
        if len(self.given) < 2:
            return {"": self}
        weights, found = self.reward_weights or {}, dict[str, EnvConfig]()
        for name in self.given:
            weighed = name in ("rewards", "custom")
            kept = {
                reward: weight
                for reward, weight in weights.items()
                if weighed and (reward in (self.rewards or {})) == (name == "rewards")
            }
            others = dict.fromkeys(other for other in self.given if other != name)
            found[name] = self.model_copy(update={**others, "reward_weights": kept})
        return found

    rules = (
        Rule(
            "missing",
            "endpoint.command",
            lambda own: own.endpoint and own.nemo_gym is None and not any(own.endpoint.command[:1]),
            fix="write [program, argument, ...]",
            says="is empty",
        ),
        Rule(
            "one-of",
            "endpoint.command",
            lambda own: own.endpoint and own.nemo_gym is not None and own.endpoint.command[1:],
            ("nemo_gym",),
            "name an interpreter alone, or remove nemo_gym",
            says="names a program with arguments, and NeMo Gym's agents play the episodes",
        ),
        Rule(
            "missing",
            "nemo_gym.config_paths",
            lambda own: own.endpoint and own.nemo_gym is not None and not own.nemo_gym.get("config_paths"),
            fix="write a list of its files",
            says="names no configuration of NeMo Gym's servers",
        ),
        Rule(
            "missing",
            "rewards",
            lambda own: own.rewards is not None and not own.rewards,
            fix="write NAME: package.module:function",
            says="names no function",
        ),
        lambda own: (
            Rule(
                "not-allowed",
                "rewards",
                when=not name or not name.isprintable(),
                fix="name it in printable text",
                says=f"the reward name {name!r:.80} is not allowed",
            )
            for name in own.rewards or ()
        ),
    )
