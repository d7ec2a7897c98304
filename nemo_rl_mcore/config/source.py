"""A source of data rows: location, columns and text around prompts."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from nemo_rl_mcore.config.base import (
    Float,
    PositiveFloat,
    PositiveInt,
    Rule,
    StrictModel,
    StrTuple,
    tuple_from_list,
)
from nemo_rl_mcore.config.environment import AnswerConfig

Keys = Mapping[str, object]

KNOWN: dict[str, Keys] = {
    "gsm8k": {
        "data_path": "openai/gsm8k",
        "subset": "main",
        "input_key": "question",
        "output_key": "answer",
        "answer": {"after": "####"},
    },
    "math": {
        "data_path": "DigitalLearningGmbH/MATH-lighteval",
        "input_key": "problem",
        "output_key": "solution",
        "answer": {"boxed": True},
    },
    "math500": {
        "data_path": "HuggingFaceH4/MATH-500",
        "split": "test",
        "input_key": "problem",
        "output_key": "solution",
        "answer": "answer",
    },
    "dapo_math_17k": {
        "data_path": "BytedTsinghua-SIA/DAPO-Math-17k",
        "input_key": "prompt",
        "output_key": "reward_model.ground_truth",
    },
    "dapo_aime_2024": {
        "data_path": "BytedTsinghua-SIA/AIME-2024",
        "input_key": "prompt",
        "output_key": "reward_model.ground_truth",
    },
    "aime_2024": {
        "data_path": "HuggingFaceH4/aime_2024",
        "input_key": "problem",
        "output_key": "answer",
    },
    "aime_2026": {
        "data_path": "MathArena/aime_2026",
        "input_key": "problem",
        "output_key": "answer",
    },
    "deepscaler": {
        "data_path": "agentica-org/DeepScaleR-Preview-Dataset",
        "input_key": "problem",
        "output_key": "answer",
    },
    "openr1_math_220k": {
        "data_path": "open-r1/OpenR1-Math-220k",
        "subset": "default",
        "input_key": "problem",
        "output_key": "answer",
    },
    "openmathinstruct2": {
        "data_path": "nvidia/OpenMathInstruct-2",
        "split": "train_1M",
        "input_key": "problem",
        "output_key": "expected_answer",
        "answer": "expected_answer",
        "split_validation_size": 0.05,
    },
    "helpsteer3": {
        "data_path": "nvidia/HelpSteer3",
        "subset": "preference",
    },
    "tulu3_sft": {
        "data_path": "allenai/tulu-3-sft-mixture",
        "split_validation_size": 0.05,
    },
    "nemotron_cascade_2_sft_math": {
        "data_path": "nvidia/Nemotron-Cascade-2-SFT-Data",
        "subset": "math",
        "split_validation_size": 0.05,
    },
    "tulu3_preference": {
        "data_path": "allenai/llama-3.1-tulu-3-8b-preference-mixture",
    },
}
"""Source keys implied by each data set name."""

OTHER_NAMES: dict[str, str] = {
    "GSM8K": "gsm8k",
    "MATH": "math",
    "MATH-500": "math500",
    "DAPOMath17K": "dapo_math_17k",
    "DAPOMathAIME2024": "dapo_aime_2024",
    "AIME2024": "aime_2024",
    "AIME2026": "aime_2026",
    "DeepScaler": "deepscaler",
    "OpenR1-Math-220k": "openr1_math_220k",
    "OpenMathInstruct-2": "openmathinstruct2",
    "HelpSteer3": "helpsteer3",
    "tulu3_sft_mixture": "tulu3_sft",
    "Nemotron-Cascade-2-SFT-Math": "nemotron_cascade_2_sft_math",
    "Tulu3Preference": "tulu3_preference",
}
"""NeMo RL's names for these data sets."""

ROW_FORMATS = (
    *("ResponseDataset", "PreferenceDataset", "BinaryPreferenceDataset", "openai_format"),
    "NemoGymDataset",
)
"""NeMo RL's names of row formats; they need no entry, since each row's format is detected from its columns."""


def _kind_of(given: object) -> str | None:
    if isinstance(given, Mapping | StrictModel):
        return "section"
    if isinstance(given, str):
        return "name"
    return "list" if isinstance(given, list | tuple) else None


_Name = Annotated[str, Tag("name")]
AnswerPlace = Annotated[Annotated[AnswerConfig, Tag("section")] | _Name, Discriminator(_kind_of)]
TEXT_FILES = ("prompt_file", "system_prompt_file")
"""Keys that name a text file."""
_OF_ONE_SPLIT = ("split", "split_validation_size", "max_samples", "repeat", "weight")
_OF_A_PLACE = ("data_path", "subset")
"""Keys of the rows' location, which validation does not inherit from data.train if it has its own location."""


def _place_rules(source: "SourceConfig") -> "Iterator[Rule[SourceConfig]]":
    """Yield a rule for an unknown dataset_name, with the closest known name, or for a missing data_path."""
    name = source.dataset_name
    if name is not None and OTHER_NAMES.get(name, name) not in KNOWN and name not in ROW_FORMATS:
        by_case = {known.lower(): known for known in (*ROW_FORMATS, *OTHER_NAMES, *KNOWN)}
        near = difflib.get_close_matches(name.lower(), by_case, n=1, cutoff=0.6)
        meant = f"did you mean {by_case[near[0]]}? else " if near else ""
        fix = f"{meant}remove it and set data_path to a file, a folder or a name on the hub"
        yield Rule("not-supported", "dataset_name", True, fix=f"{fix}; known: {', '.join(KNOWN)}")
    elif not source.data_path:
        fix = "name files, a folder or a data set of the hub"
        yield Rule("missing", "data_path", True, ("dataset_name",), fix)


class SourceDefaults(StrictModel):
    """Texts around prompts, and their environment, for every source that does not set its own."""

    prompt_file: str | None = None
    """Text file with {} for the prompt, relative to the recipe or the working directory; null adds no text."""
    system_prompt_file: str | None = None
    """Text file put before the prompt, as the system message with data.apply_chat_template; null adds no text."""
    env_name: str | None = None
    """Section of `env` that scores the answers to this source's prompts; null if `env` has only one."""


class SourceConfig(SourceDefaults):
    """A source of data rows: a known data set, a data set on the hub, a folder, or files."""

    dataset_name: str | None = None
    """A data set listed in docs/data.md, which provides defaults for the other keys; null for any other data set."""
    data_path: str | StrTuple | None = None
    """JSONL, JSON, Parquet or CSV files (one, several, or a pattern with *), a folder, or a hub id; null only with
    dataset_name."""
    subset: str | None = None
    """Configuration (subset) of a data set on the hub; null for a data set without configurations."""
    split: str | None = None
    """Rows to read, such as train, test, train[:90%] or train+test; null means train, or all rows of files."""
    input_key: str = "input"
    """Column of the prompt: text or, with data.apply_chat_template, a list of messages. Dots address nested columns."""
    output_key: str | None = "output"
    """Column of the answer, a text or a number; null if reward functions read only other columns."""
    columns: StrTuple = ()
    """Additional columns passed by name to reward functions (ours)."""
    answer: AnswerPlace | None = None
    """Reference answer for scoring: the name of its column, or a section that locates it within output_key; null means
    all of output_key. Training on given answers always uses all of output_key (ours)."""
    chat_key: str = "messages"
    """Column of a whole conversation, which replaces prompt and answer when training on given answers."""
    tool_key: str | None = "tools"
    """Column of tool definitions, rendered by the chat template; null reads none."""
    prompt_key: str = "prompt"
    """Column of the prompt in pairs (offline DPO)."""
    chosen_key: str = "chosen"
    """Column of the better answer in pairs."""
    rejected_key: str = "rejected"
    """Column of the worse answer in pairs."""
    ties: Literal["drop", "keep"] = "drop"
    """Handling of pairs without a better answer: drop them, or keep them with the first answer in both roles (ours)."""
    split_validation_size: Annotated[Float, Field(ge=0, lt=1)] = 0.1
    """Share of rows held out by a hash of the prompt; read in data.train if data.validation is null."""
    max_samples: PositiveInt | None = None
    """Size of a fixed random subset of the rows; null means all rows."""
    repeat: PositiveInt = 1
    """Number of copies of each row, each answered separately."""
    weight: PositiveFloat | None = None
    """Share of prompts drawn from this source, relative to the other weights; null joins all sources' rows (ours)."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: object) -> object:
        """Fill in a known data set's keys; only its columns if data_path names other files."""
        if not isinstance(given, Mapping):
            return given
        keys = dict(cast("Mapping[str, object]", given))
        name = keys.get("dataset_name")
        known: Keys = KNOWN.get(OTHER_NAMES.get(name, name), {}) if isinstance(name, str) else {}
        left_out = ("subset", "split") if keys.get("data_path") is not None else ()
        return {**{key: value for key, value in known.items() if key not in left_out}, **keys}

    rules = (_place_rules,)

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the files, the folder or the hub id."""
        return (self.data_path,) if isinstance(self.data_path, str) else self.data_path or ()

    @property
    def name(self) -> str:
        """Return a short name: the data set's, or the first file's."""
        known = OTHER_NAMES.get(self.dataset_name or "", self.dataset_name)
        if known in KNOWN:
            return known
        return self.paths[0].rstrip("/").rpartition("/")[2].partition(".")[0] or "rows"


_Section = Annotated[SourceConfig, Tag("section")]
_SectionOrName = Annotated[_Section | _Name, Discriminator(_kind_of)]

Sources = Annotated[
    _Section | Annotated[tuple[SourceConfig, ...], BeforeValidator(tuple_from_list), Tag("list")],
    Discriminator(_kind_of),
]
"""A source, or a list of sources."""
SourcesOrNames = Annotated[
    _Section | _Name | Annotated[tuple[_SectionOrName, ...], BeforeValidator(tuple_from_list), Tag("list")],
    Discriminator(_kind_of),
]
"""A source, the name of a set in eval.sets, or a list of either."""


def each(given: object) -> dict[str, object]:
    """Return sources by path suffix: the empty string for a single source, the index for each source of a list."""
    if isinstance(given, list | tuple):
        return {str(place): one for place, one in enumerate(cast("list[object]", given))}
    return {} if given is None else {"": given}


def with_defaults(given: object, default: object) -> object:
    """Return sources with their missing keys filled from data.default."""
    if not isinstance(default, Mapping):
        return given
    given_there = cast("Mapping[str, object]", default)
    shared = {key: value for key, value in given_there.items() if key in SourceDefaults.model_fields}
    sources = cast("list[object]", given) if isinstance(given, list) else [given]
    filled = [
        {**shared, **cast("Mapping[str, object]", one)} if isinstance(one, Mapping) else one
        for one in sources
    ]
    return filled if isinstance(given, list) else filled[0]


def as_in_train(validation: Mapping[str, object], train: Mapping[str, object]) -> dict[str, object]:
    """Return a validation section with its missing keys filled from data.train.

    A section with dataset_name inherits only the texts around prompts; one with data_path also inherits the columns;
    one with neither is another split of the same data set.
    """
    if validation.get("dataset_name") is not None:
        keys = [*SourceDefaults.model_fields]
    else:
        own = validation.get("data_path") is not None
        left_out = (*_OF_ONE_SPLIT, *(_OF_A_PLACE if own else ()))
        keys = [key for key in SourceConfig.model_fields if key not in left_out]
    return {**{key: train[key] for key in keys if key in train}, **validation}


def names_of(sources: Mapping[str, SourceConfig]) -> dict[str, str]:
    """Return a unique name for each source by path: its set's name in eval.sets, or its own, numbered if taken."""
    names = dict[str, str]()
    for path, source in sources.items():
        own = path.removeprefix("eval.sets.") if path.startswith("eval.sets.") else source.name
        numbered = (own, *(f"{own}_{number}" for number in range(2, len(sources) + 2)))
        names[path] = next(name for name in numbered if name not in names.values())
    return names
