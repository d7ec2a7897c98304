"""Configurations of the prompts and of the environment that scores the answers."""

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Literal, cast

from pydantic import Field, model_validator

from nemo_rl_mcore.config.answers import AnswerConfig
from nemo_rl_mcore.config.base import Float, PositiveInt, Problem, StrictModel, has_no_effect, join_path
from nemo_rl_mcore.config.endpoint import EndpointConfig
from nemo_rl_mcore.config.environment_pool import EnvPoolConfig
from nemo_rl_mcore.config.imports import Arguments, ImportPath
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


class DataConfig(StrictModel):
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
    type: ImportPath | None = None
    """Of custom: the import path of the class, `package.module:Name` (ours)."""
    args: Arguments | None = None
    """Of custom: keyword arguments of the class, beside seed (ours)."""

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

    def problems(self) -> Iterator[Problem]:
        """Yield keys that the data set lacks or does not read, and prompts that are longer than the maximum."""
        yield from self._source_problems()
        yield from self._weight_problems()
        yield from self._text_problems()
        if self.has_turns and self.num_digits % 2:
            yield Problem(
                "not-divisible",
                "num_digits",
                f"{self.num_digits} is odd, and a prompt of dataset_name: {self.dataset_name} has two numbers of as "
                "many digits",
                f"set it to {self.num_digits + 1} or {self.num_digits - 1}",
                ("dataset_name",),
            )
        if self.embedded and not self.has_turns and self.apply_chat_template:
            yield Problem(
                "incompatible",
                "apply_chat_template",
                f"true does not go with dataset_name: {self.dataset_name}, whose prompts are no conversations",
                "set it to false, or name a data set of conversations in data.train",
                ("dataset_name",),
            )
        longest = self.max_input_seq_length
        if self.embedded and longest is not None and longest < self.prompt_length:
            yield Problem(
                "too-small",
                "max_input_seq_length",
                f"{longest} is shorter than the prompts of {self.dataset_name} with "
                f"num_digits: {self.num_digits}, which have {self.prompt_length} tokens",
                f"set max_input_seq_length to {self.prompt_length} or more, or lower num_digits",
                ("num_digits",),
            )

    def _source_problems(self) -> Iterator[Problem]:
        read_by = (
            ("train", self.train is not None, "files", True),
            ("default", self.default is not None and not self.has_turns, "files", False),
            ("validation", self.validation is not None, "files", False),
            ("shuffle", not self.shuffle, "files", False),
            ("type", self.type is not None, "custom", True),
            ("args", bool(self.args), "custom", False),
        )
        for key, given, reader, needed in read_by:
            if given and self.dataset_name != reader:
                yield Problem(
                    "incompatible",
                    key,
                    f"does not go with dataset_name: {self.dataset_name}",
                    f"remove it, or set dataset_name: {reader}",
                    ("dataset_name",),
                )
            if needed and not given and self.dataset_name == reader:
                example = (
                    "train: {data_path: train.jsonl}" if key == "train" else "type: my_pkg.my_mod:MyData"
                )
                yield Problem(
                    "missing",
                    key,
                    f"missing with dataset_name: {reader}",
                    f"set {example}",
                    ("dataset_name",),
                )

    def _text_problems(self) -> Iterator[Problem]:
        """Yield a reader of rows where there are none."""
        if self.has_turns and self.default is not None and self.default.processor is not None:
            because = f"with dataset_name: {self.dataset_name}"
            yield has_no_effect("default.processor", self.default.processor, because, "dataset_name")

    def _weight_problems(self) -> Iterator[Problem]:
        """Yield weights without others beside them, and such as have no order that starts over."""
        weights = {path: source.weight for path, source in self.train_sources.items()}
        given = [weight for weight in weights.values() if weight is not None]
        for path, weight in weights.items():
            if given and weight is None:
                yield Problem(
                    "missing",
                    f"{path}.weight",
                    "missing, and other sources have one",
                    "give all of them one, or none",
                )
            if weight is not None and len(weights) == 1:
                yield has_no_effect(f"{path}.weight", weight, "where there is one source")
        if len(given) == len(weights) > 1 and (turns := sum(whole_weights(given))) > MOST_TURNS:
            yield Problem(
                "too-large",
                "train",
                f"the weights are in the ratio of integers with the sum {turns}, and {MOST_TURNS} is the most",
                "give them fewer digits",
            )
        for place, source in each(self.validation).items():
            if isinstance(source, SourceConfig) and source.weight is not None:
                path = join_path(join_path("validation", place), "weight")
                yield has_no_effect(
                    path, source.weight, "on a validation, which takes as many rows of each source"
                )


class ArithmeticEnvConfig(StrictModel):
    """The environment of the embedded tasks: the share of correct characters, end-of-sequence included."""


class GuessNumberEnvConfig(StrictModel):
    """The environment of guess_number: each guess is answered by `h>`, higher, or `l>`, lower, until one hits."""


class CalculatorEnvConfig(StrictModel):
    """The environment of calculator: a sum is answered by its value, a number ends the episode."""


class MathEnvConfig(StrictModel):
    """1 for a response whose final answer equals the one of the data, as `math-verify` judges it, else 0."""

    gold: AnswerConfig | None = None
    """Where the data's answer states what is scored against; null takes all of it (ours)."""
    response: AnswerConfig | None = None
    """Where a response states its answer; null has math-verify look for it, a box before all else (ours)."""
    timeout_s: PositiveInt = 5
    """Seconds to read an expression, and to compare two, after which the response is wrong (ours)."""
    unparsable: Literal["refuse", "drop", "zero"] = "refuse"
    """An answer of the data that nothing can equal: end the run before it starts, leave the row out, or give each
    response to it 0, as NeMo RL does and `eval` of dropped rows too (ours)."""


class CustomEnvConfig(StrictModel):
    """A class of one's own."""

    type: ImportPath
    """The import path of the class, `package.module:Name`."""
    args: Arguments | None = None
    """Keyword arguments of the class."""


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
    max_observation_chars: PositiveInt = 100_000
    """Characters of an observation that the model is shown, from its beginning on (ours); each that is cut counts in
    `episodes/observations_cut`, and the record of the answer says by how much."""
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
    def pool_cpus(self) -> float:
        """Return the number of CPUs that all its processes together keep."""
        return self.pool_size * self.pool.num_cpus

    @property
    def given(self) -> list[str]:
        """Return the environments that there are sections of."""
        return [name for name in ENVIRONMENTS if getattr(self, name) is not None]

    def problems(self) -> Iterator[Problem]:
        """Yield a second environment, agents of none or of two kinds, and rewards without a function or a name."""
        yield from self._agent_problems()
        if self.rewards is not None and not self.rewards:
            yield Problem("missing", "rewards", "names no function", "write NAME: package.module:function")
        for name in self.rewards or ():
            if not name or not name.isprintable():
                yield Problem(
                    "not-allowed", "rewards", f"a reward is called {name!r:.80}", "name it in printable text"
                )
        given = self.given
        if len(given) > 1:
            yield Problem(
                "one-of",
                given[-1],
                f"a run has one environment, and {' and '.join(given)} are given",
                f"set {given[0]}: null",
                tuple(given),
            )

    def _agent_problems(self) -> Iterator[Problem]:
        if self.endpoint is None:
            return
        command = self.endpoint.command
        if self.nemo_gym is None and not (command and command[0]):
            yield Problem("missing", "endpoint.command", "names no program", "write [program, argument, ...]")
        elif self.nemo_gym is not None and command:
            what = "names a program, and NeMo Gym's agents play the episodes"
            yield Problem("one-of", "endpoint.command", what, "remove it, or nemo_gym", ("nemo_gym",))
        if self.nemo_gym is not None and not self.nemo_gym.get("config_paths"):
            what = "names no configuration of NeMo Gym's servers"
            yield Problem("missing", "nemo_gym.config_paths", what, "write a list of its files")
