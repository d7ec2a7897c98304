"""Configurations of the prompts and of the environment that scores the answers."""

import math
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Literal, cast

from pydantic import Field, model_validator

from nemo_rl_mcore.config.base import Float, PositiveInt, Rule, StrictModel, join_path
from nemo_rl_mcore.config.custom_code import Arguments, ImportPath, OwnClassConfig
from nemo_rl_mcore.config.environment import AnswerConfig, EndpointConfig, EnvPoolConfig
from nemo_rl_mcore.config.shares import MOST_TURNS, whole_weights
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
"""Embedded tasks of several turns; the environment of each has its name."""
ENVIRONMENTS = ("arithmetic", *TURN_TASKS, "math", "rewards", "custom")
"""The sections of `env`, one of which a run has."""

GIVEN_TO_REWARDS = ("prompts", "responses", "answers", "finished")
"""What a function of env.rewards may take besides columns of the data."""
SAME_AS_GIVEN = {
    "completions": "responses",
    "prompt": "prompts",
    "answer": "answers",
    "ground_truth": "answers",
}
"""Names that other trainers have for it."""


class RowKind(Enum):
    """What an algorithm reads of a row."""

    PROMPTS = "a prompt and the answer to score against"
    ANSWERS = "an answer to imitate: prompt and answer, or a conversation"
    PAIRS = "a prompt, a better answer and a worse one"


def _of_data_sets(key: str, reader: str, example: str) -> "Iterator[Rule[DataConfig]]":
    """Yield the rules of a key that one kind of data set reads; example: what to set, where that needs it."""

    def is_given(data: "DataConfig") -> bool:
        # The embedded tasks of several turns read default as well.
        default = DataConfig.model_fields[key].default
        return getattr(data, key) not in (default, {}) and not (key == "default" and data.has_turns)

    yield Rule(
        "incompatible",
        key,
        lambda own: is_given(own) and own.dataset_name != reader,
        ("dataset_name",),
        f"remove it, or set dataset_name: {reader}",
    )
    if example:
        yield Rule(
            "missing",
            key,
            lambda own: not is_given(own) and own.dataset_name == reader,
            ("dataset_name",),
            example,
        )


def _weight_rules(data: "DataConfig") -> "Iterator[Rule[DataConfig]]":
    """Yield rules of weights without others beside them, and such as have no order that starts over."""
    weights = {path: source.weight for path, source in data.train_sources.items()}
    given = [weight for weight in weights.values() if weight is not None]
    for path, weight in weights.items():
        fix = "give all sources a weight, or none"
        yield Rule(
            "missing", f"{path}.weight", bool(given) and weight is None, fix=fix, why="other sources have one"
        )
        alone = weight is not None and len(weights) == 1
        yield Rule("has-no-effect", f"{path}.weight", alone, why="there is one source")
    turns = sum(whole_weights(given)) if len(given) == len(weights) > 1 else 0
    yield Rule(
        "too-large",
        "train",
        turns > MOST_TURNS,
        fix="give the weights fewer digits",
        says=f"the weights are in the ratio of integers with the sum {turns}, and {MOST_TURNS} is the most",
    )
    for place, source in each(data.validation).items():
        path, why = join_path("validation", place), "a validation takes as many rows of each source"
        weighs = isinstance(source, SourceConfig) and source.weight is not None
        yield Rule("has-no-effect", f"{path}.weight", weighs, why=why)


class DataConfig(OwnClassConfig):
    """The prompts: an embedded task over strings of digits, sources of rows, or a class of one's own."""

    dataset_name: Literal[
        "copy", "reverse", "sort", "increment", "guess_number", "calculator", "files", "custom"
    ]
    """The task: answer the digits as they are, in reverse, sorted, or each one higher; or files; or custom.

    Of several turns: guess_number, find a number between two bounds; calculator, have the sum of two numbers computed.
    Left out, data.train or data.type says it; jsonl is an older name of files."""
    num_digits: Annotated[int, Field(ge=1, le=9)] = 3
    """Of an embedded task: digits of a prompt; its text is the digits and a `>`, of calculator with a `+` between."""
    max_input_seq_length: PositiveInt | None = None
    """Tokens of a prompt at most; null takes the length that the task has, or what the response leaves room for."""
    default: SourceDefaults | None = None
    """Keys of every source that leaves them out; the embedded tasks of several turns are shown in its texts, too."""
    train: Sources | None = None
    """Of files: the rows to train on, a source or a list of them."""
    validation: SourcesOrNames | None = None
    """Of files: the rows to validate with, as data.train, or names of eval.sets; null holds out a share of data.train.

    A section here takes the keys that it leaves out from a data.train that is a section."""
    shuffle: bool = True
    """Of files: take the rows of each pass in a random order of its own; false takes them as they lie."""
    apply_chat_template: bool = False
    """Show prompts to the model as its tokenizer's chat template does; false gives it the plain text (ours)."""
    add_bos: bool = False
    """Begin each prompt with the tokenizer's begin of sequence, where the chat template or the text has none."""
    add_eos: bool = False
    """Of answers given in conversations (SFT, DPO): end the row with the end of sequence where the chat template writes
    none; plain text always has it."""
    imitated: Literal["answer", "to_turn_end", "turn"] = "answer"
    """Of answers given in conversations the tokens that are trained on (ours): answer, with its end of sequence;
    to_turn_end, with what the template writes after that, too; turn, with what opens it as well."""
    special_tokens_in_content: Literal["text", "parse"] | None = None
    """What a special token of the tokenizer is that a row spells, such as `<|im_end|>` (ours): text, the characters, as
    all of a row is; parse, the token itself, which ends a turn. Null refuses data with such rows. What an environment
    says is text unless this is parse; prompt files, system prompts and chat templates are always parsed."""
    overlong: Literal["error", "drop"] = "error"
    """What becomes of a row of a file that has too many tokens (ours)."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: object) -> object:
        """Name the data set where the other keys say it, and hand on the keys that sources share."""
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
    def train_sources(self) -> dict[str, SourceConfig]:
        """Return the sources to train on, by their path in this section."""
        return {
            join_path("train", place): cast("SourceConfig", one) for place, one in each(self.train).items()
        }

    @property
    def from_files(self) -> bool:
        """Return whether the prompts are those of data.train."""
        return self.dataset_name == "files"

    @property
    def parses_content(self) -> bool:
        """Return whether special tokens that rows and environments spell are those tokens."""
        return self.special_tokens_in_content == "parse"

    @property
    def embedded(self) -> bool:
        """Return whether the prompts are those of an embedded task."""
        return self.dataset_name not in ("files", "custom")

    @property
    def has_turns(self) -> bool:
        """Return whether the prompts are those of an embedded task of several turns."""
        return self.dataset_name in TURN_TASKS

    @property
    def shown_in_texts(self) -> bool:
        """Return whether other text than the prompt's own is shown with it: a chat template's, or that of a file."""
        return self.apply_chat_template or self.default is not None

    @property
    def prompt_length(self) -> int:
        """Return the length of a prompt of an embedded task: the digits, the `>` and a sign between two numbers."""
        return self.num_digits + 1 + (self.dataset_name == "calculator")

    @property
    def train_prompts(self) -> int:
        """Different training prompts of an embedded task that surely exist; a hash decides the exact share."""
        return 87 * self._all_prompts // 100

    @property
    def validation_prompts(self) -> int:
        """Return how many held-out prompts of an embedded task surely exist; a hash decides the exact share."""
        return 9 * self._all_prompts // 100

    @property
    def _all_prompts(self) -> int:
        """Of guess_number there is one for each number between each two bounds."""
        bounds = 10 ** (self.num_digits // 2)
        pairs = bounds * (bounds + 1) * (bounds + 2) // 6 - bounds
        return pairs if self.dataset_name == "guess_number" else 10**self.num_digits

    @property
    def max_prompt_length(self) -> int | None:
        """Return the tokens that a sequence must have room for before the response; None where the response says it."""
        if self.max_input_seq_length is None and self.embedded and not self.shown_in_texts:
            return self.prompt_length
        return self.max_input_seq_length

    read_unless = ()

    rules = (
        *(
            row
            for key, reader, example in (
                ("train", "files", "set train: {data_path: train.jsonl}"),
                ("default", "files", ""),
                ("validation", "files", ""),
                ("shuffle", "files", ""),
                ("type", "custom", "set type: my_pkg.my_mod:MyData"),
                ("args", "custom", ""),
            )
            for row in _of_data_sets(key, reader, example)
        ),
        lambda own: _weight_rules(own),
        Rule(
            "not-divisible",
            "num_digits",
            lambda own: own.has_turns and own.num_digits % 2,
            ("dataset_name",),
            "make it even",
            "a prompt has two numbers of as many digits",
        ),
        Rule(
            "incompatible",
            "apply_chat_template",
            lambda own: own.embedded and not own.has_turns and own.apply_chat_template,
            ("dataset_name",),
            "set it to false, or name a data set of conversations in data.train",
            "its prompts are no conversations",
        ),
        Rule(
            "too-small",
            "max_input_seq_length",
            lambda own: own.embedded and (own.max_input_seq_length or math.inf) < own.prompt_length,
            ("num_digits",),
            lambda own: f"set it to {own.prompt_length} or more, or lower num_digits",
            lambda own: f"prompts of {own.dataset_name} have {own.prompt_length} tokens",
        ),
    )


class ArithmeticEnvConfig(StrictModel):
    """The environment of the embedded tasks: the share of correct characters, end-of-sequence included."""


class GuessNumberEnvConfig(StrictModel):
    """The environment of guess_number: each guess is answered by `h>`, higher, or `l>`, lower, until one hits."""


class CalculatorEnvConfig(StrictModel):
    """The environment of calculator: a sum is answered by its value, a number ends the episode."""


SCORE_WITHIN_S = 5
"""Time to read an expression, and to compare two, after which a response is wrong."""


class MathEnvConfig(StrictModel):
    """1 for a response whose final answer equals the one of the data, as `math-verify` judges it, else 0."""

    gold: AnswerConfig | None = None
    """Where the data's answer states what is scored against; null takes all of it (ours)."""
    response: AnswerConfig | None = None
    """Where a response states its answer; null has math-verify look for it, a box before all else (ours)."""
    unparsable: Literal["refuse", "drop", "zero"] = "refuse"
    """An answer of the data that nothing can equal: end the run before it starts, leave the row out, or give each
    response to it 0, as NeMo RL does and `eval` of dropped rows too (ours)."""


class CustomEnvConfig(OwnClassConfig):
    """A class of one's own."""

    read_unless = ()

    rules = (Rule("missing", "type", lambda own: own.type is None, fix="set it: package.module:Name"),)


class EnvConfig(StrictModel):
    """The environment that scores the answers: one of the sections, and arithmetic where there is none."""

    arithmetic: ArithmeticEnvConfig | None = None
    """The embedded tasks."""
    guess_number: GuessNumberEnvConfig | None = None
    """The embedded game; an episode has several turns (ours)."""
    calculator: CalculatorEnvConfig | None = None
    """The embedded tool; an episode has several turns (ours)."""
    math: MathEnvConfig | None = None
    """Mathematical expressions; needs the extra math."""
    rewards: dict[str, ImportPath] | None = None
    """Reward functions of one's own by name, such as `right: my_pkg.rewards:right` (ours); the reward of an answer is
    their sum, weighted by reward_weights."""
    custom: CustomEnvConfig | None = None
    """A class of one's own (ours)."""
    reward_weights: dict[str, Float] | None = None
    """Factors of the rewards of env.rewards or env.custom by their name; 1 for each that is not named (ours)."""
    unscored: Literal["refuse", "drop"] = "refuse"
    """What becomes of an answer whose reward, or a part of it by name, is None (ours): refuse ends the run; drop leaves
    it out of baselines, deviations, the loss and validations, and counts it in `episodes/unscored_rate`."""
    pool: EnvPoolConfig = EnvPoolConfig()
    """The processes in which it runs (ours)."""
    endpoint: EndpointConfig | None = None
    """Agents that play the episodes, each a process of its own (ours); the environment, if there is one, scores those
    that give no reward themselves."""
    nemo_gym: Arguments | None = None
    """NeMo Gym's own configuration, passed on to it: config_paths, and what completes them. Its agents play the
    episodes and give the rewards; rows of the data are Gym's, each with responses_create_params and agent_ref."""

    @model_validator(mode="before")
    @classmethod
    def _open_endpoint(cls, given: object) -> object:
        """Give NeMo Gym's agents an endpoint where the recipe leaves it out."""
        if not isinstance(given, Mapping):
            return given
        section = dict(cast("Mapping[str, object]", given))
        if section.get("nemo_gym") is not None and section.get("endpoint") is None:
            section["endpoint"] = {}
        return section

    @property
    def pool_size(self) -> int:
        """Return the number of processes in which the environment runs; 0 where it runs in that of the loop."""
        if self.pool.size is not None:
            return self.pool.size
        return 1 if self.math or self.custom or self.rewards else 0

    @property
    def given(self) -> list[str]:
        """Return the environments that there are sections of."""
        return [name for name in ENVIRONMENTS if getattr(self, name) is not None]

    rules = (
        Rule(
            "missing",
            "endpoint.command",
            lambda own: own.endpoint and own.nemo_gym is None and not any(own.endpoint.command[:1]),
            fix="write [program, argument, ...]",
            says="names no program",
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
                says=f"a reward is called {name!r:.80}",
            )
            for name in own.rewards or ()
        ),
        lambda own: (
            Rule(
                "one-of",
                name,
                related=tuple(own.given),
                when=True,
                fix=f"set {own.given[0]}: null",
                says=f"a run has one environment, and {' and '.join(own.given)} are given",
            )
            for name in own.given[1:][-1:]
        ),
    )
