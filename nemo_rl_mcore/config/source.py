"""A source of rows: where it lies, its columns, and how its prompts are shown."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from nemo_rl_mcore.config.base import Float, PositiveFloat, PositiveInt, Rule, StrictModel, StrTuple, broken
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
        "answer": {"key": "answer"},
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
        "answer": {"key": "expected_answer"},
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
"""The keys of a source that each name stands for."""

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
"""NeMo RL's names of them."""

ROW_FORMATS = (
    *("ResponseDataset", "PreferenceDataset", "BinaryPreferenceDataset", "openai_format"),
    "NemoGymDataset",
)
"""NeMo RL's names of formats whose keys are those of a source; which one a row has is seen from the row."""


def known_name(name: str) -> str | None:
    """Return the entry of the table that a name stands for; None where it is none."""
    name = OTHER_NAMES.get(name, name)
    return name if name in KNOWN else None


def nearest_name(name: str) -> str | None:
    """Return the known name that an unknown one was most likely meant to be."""
    by_case = {known.lower(): known for known in (*ROW_FORMATS, *OTHER_NAMES, *KNOWN)}
    near = difflib.get_close_matches(name.lower(), by_case, n=1, cutoff=0.6)
    return by_case[near[0]] if near else None


TEXT_FILES = ("prompt_file", "system_prompt_file")
"""Keys that name a file of text."""
_OF_ONE_SPLIT = ("split", "split_validation_size", "max_samples", "repeat", "weight", "streaming")
_OF_A_PLACE = ("data_path", "subset")
"""Keys that validation does not take from data.train; where the rows lie, unless it says so itself."""


class SourceAnswerConfig(AnswerConfig):
    """What of a row's answer is scored against: another column, a part of the text, or a part of that column."""

    key: str | None = None
    """A column that holds it, where it is another one than output_key (ours)."""

    rules = (lambda own: broken(AnswerConfig.rules, own) if own.key is None or own.in_text else (),)

    @property
    def in_text(self) -> bool:
        """Return whether it is a part of a text."""
        return self.after is not None or self.regex is not None or self.boxed


class SourceDefaults(StrictModel):
    """How prompts are shown, in every source that does not say it itself."""

    prompt_file: str | None = None
    """A text with one {}, the place of the prompt; a path from the recipe, or from where the command is started."""
    system_prompt_file: str | None = None
    """A text that stands before the prompt: with data.apply_chat_template the system's message."""


class SourceConfig(SourceDefaults):
    """A source of rows: a data set that has a name here, one of the hub, a folder, or files of rows."""

    dataset_name: str | None = None
    """A data set of the table in docs/data.md, which fills the keys below that are left out; null is any other."""
    data_path: str | StrTuple | None = None
    """Files of JSONL, JSON, parquet or CSV (one, several, or a pattern with *), a folder, or a name on the hub."""
    subset: str | None = None
    """The configuration of a data set of the hub."""
    split: str | None = None
    """Which rows, such as train, test, train[:90%] or train+test; null takes train, and of files all rows."""
    input_key: str = "input"
    """Key of the prompt: text, or with data.apply_chat_template also a list of messages. Dots lead into columns."""
    output_key: str | None = "output"
    """Key of the answer: text or a number. Null where there is none, and reward functions judge by other columns."""
    columns: StrTuple = ()
    """Further columns, which reward functions take by these names (ours); each row has them."""
    answer: SourceAnswerConfig | None = None
    """What of the answer is scored against (ours); null takes all of it. What is imitated stays whole."""
    chat_key: str = "messages"
    """Key of a whole conversation, which takes the place of prompt and answer where answers are imitated."""
    tool_key: str | None = "tools"
    """Key of the tools that answers in a conversation may call, which the chat template is given; null reads none."""
    prompt_key: str = "prompt"
    """Of pairs (offline DPO): key of the prompt."""
    chosen_key: str = "chosen"
    """Of pairs: key of the better answer."""
    rejected_key: str = "rejected"
    """Of pairs: key of the worse answer."""
    ties: Literal["drop", "keep"] = "drop"
    """Of pairs whose rows say that neither answer is better: leave them out, or take the first as both (ours)."""
    split_validation_size: Annotated[Float, Field(ge=0, lt=1)] = 0.1
    """Share held out, by a hash of the prompt; read in data.train where data.validation is null."""
    max_samples: PositiveInt | None = None
    """As many rows, drawn at random, always the same ones; null takes all."""
    repeat: PositiveInt = 1
    """How often the rows are taken, one time after the other, each time with answers of their own."""
    weight: PositiveFloat | None = None
    """Share of the prompts, beside the weights of the other sources; null joins the rows of all (ours)."""
    streaming: bool = False
    """Read the rows as they are needed instead of all at the start (ours); needs max_num_steps."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: object) -> object:
        """Fill in what a known name stands for; of files or a folder in its place the columns alone."""
        if not isinstance(given, Mapping):
            return given
        keys = dict(cast("Mapping[str, object]", given))
        name = keys.get("dataset_name")
        known = known_name(name) if isinstance(name, str) else None
        if known is None:
            return keys
        left_out = ("subset", "split") if keys.get("data_path") is not None else ()
        filled = {key: value for key, value in KNOWN[known].items() if key not in left_out}
        return {**filled, **keys}

    rules = (
        Rule(
            "not-supported",
            "dataset_name",
            lambda own: own.is_unknown,
            fix=lambda own: (
                (
                    f"did you mean {nearest}? else "
                    if (nearest := nearest_name(own.dataset_name or ""))
                    else ""
                )
                + f"remove it and set data_path to a file, a folder or a name on the hub; known: {', '.join(KNOWN)}"
            ),
        ),
        Rule(
            "missing",
            "data_path",
            lambda own: not own.data_path and not own.is_unknown,
            ("dataset_name",),
            "name files, a folder or a data set of the hub",
        ),
    )

    @property
    def is_unknown(self) -> bool:
        """Return whether the data set has a name that is not known here."""
        name = self.dataset_name
        return name is not None and known_name(name) is None and name not in ROW_FORMATS

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the files, the folder or the name on the hub."""
        return (self.data_path,) if isinstance(self.data_path, str) else self.data_path or ()

    @property
    def name(self) -> str:
        """Return a short name: that of the data set, or of the first file."""
        if self.dataset_name is not None and (known := known_name(self.dataset_name)) is not None:
            return known
        return self.paths[0].rstrip("/").rpartition("/")[2].partition(".")[0] or "rows"


def _kind_of(given: object) -> str | None:
    if isinstance(given, Mapping | SourceConfig):
        return "section"
    if isinstance(given, str):
        return "name"
    return "list" if isinstance(given, list | tuple) else None


def _as_tuple(given: object) -> object:
    return tuple(cast("list[object]", given)) if isinstance(given, list) else given


_Section = Annotated[SourceConfig, Tag("section")]
_Name = Annotated[str, Tag("name")]
_SectionOrName = Annotated[_Section | _Name, Discriminator(_kind_of)]

Sources = Annotated[
    _Section | Annotated[tuple[SourceConfig, ...], BeforeValidator(_as_tuple), Tag("list")],
    Discriminator(_kind_of),
]
"""One source, or a list of them."""
SourcesOrNames = Annotated[
    _Section | _Name | Annotated[tuple[_SectionOrName, ...], BeforeValidator(_as_tuple), Tag("list")],
    Discriminator(_kind_of),
]
"""One source, or a list of them; a text is the name of a set of eval.sets."""


def each(given: object) -> dict[str, object]:
    """Return one source or each of a list, by what stands after the key in its path: nothing, or its place."""
    if isinstance(given, list | tuple):
        return {str(place): one for place, one in enumerate(cast("list[object]", given))}
    return {} if given is None else {"": given}


def with_defaults(given: object, default: object) -> object:
    """Return sources with the keys that they leave out filled from data.default."""
    if not isinstance(default, Mapping):
        return given
    given_there = cast("Mapping[str, object]", default)
    shared = {key: value for key, value in given_there.items() if key in SourceDefaults.model_fields}

    def filled(one: object) -> object:
        return {**shared, **cast("Mapping[str, object]", one)} if isinstance(one, Mapping) else one

    if isinstance(given, list):
        return [filled(one) for one in cast("list[object]", given)]
    return filled(given)


def as_in_train(validation: Mapping[str, object], train: Mapping[str, object]) -> dict[str, object]:
    """Return a section of validation with what it leaves out taken from that of data.train.

    One that names a data set shares no more than the texts around a prompt; one that has files of its own shares the
    columns, too, and one that has neither is another split of the same data set.
    """
    if validation.get("dataset_name") is not None:
        keys = [*SourceDefaults.model_fields]
    else:
        own = validation.get("data_path") is not None
        left_out = (*_OF_ONE_SPLIT, *(_OF_A_PLACE if own else ()))
        keys = [key for key in SourceConfig.model_fields if key not in left_out]
    return {**{key: train[key] for key in keys if key in train}, **validation}


def names_of(sources: Mapping[str, SourceConfig]) -> dict[str, str]:
    """Return a name for each source by its path: that of its set of eval.sets, or its own, numbered where taken."""
    names = dict[str, str]()
    for path, source in sources.items():
        own = path.removeprefix("eval.sets.") if path.startswith("eval.sets.") else source.name
        numbered = (own, *(f"{own}_{number}" for number in range(2, len(sources) + 2)))
        names[path] = next(name for name in numbered if name not in names.values())
    return names
