"""What the data set of a run tells on paper: rows, steps, and what is wrong with its files or its class."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.data.chat_template import unshown_problems
from nemo_rl_mcore.data.examples import Example, Examples, read_examples, read_run_examples
from nemo_rl_mcore.data.hub_cache import local_folder
from nemo_rl_mcore.data.prompt_texts import read_texts
from nemo_rl_mcore.data.row_counts import count_problems
from nemo_rl_mcore.data.row_readers import GYM_COLUMN
from nemo_rl_mcore.data.rows import is_fetched
from nemo_rl_mcore.data.special_tokens import run_token_problems
from nemo_rl_mcore.data.strict_json import read_json
from nemo_rl_mcore.data.tokenizer_folder import special_tokens_of
from nemo_rl_mcore.environment.answer_kinds import gold_answer, gold_problems, wrong_answer

_TOKENIZER = "policy.tokenizer.name"
FIRST_ROWS = 2
"""How many rows `check` shows."""


@dataclass(frozen=True)
class DataPlan:
    """How long the files of a data set last; rows that are dropped for their length are still counted.

    first: of the rows to train on, those that `check` shows. equal_pairs: pairs of two equal answers.
    """

    rows: int
    held_out: int
    rows_per_step: int
    steps: int
    first: tuple[Example, ...] = ()
    equal_pairs: tuple[Example, ...] = ()

    @property
    def steps_per_epoch(self) -> float:
        """Return the number of steps of a pass over the rows; a step may begin in one pass and end in the next."""
        return self.rows / self.rows_per_step


def examine_data(config: RunConfig) -> tuple[DataPlan | None, list[Problem]]:
    """Read the data set's files; None where its rows cannot be counted: they have no end, or are fetched later.

    Among the problems are warnings.
    """
    problems = [*template_problems(config)]
    if not config.data.from_files:
        texts = config.data.default
        return None, problems + [one.below("data.default") for one in (read_texts(texts)[1] if texts else ())]
    if fetched(config) or streamed(config):
        return None, problems + _problems_of_what_is_here(config)
    examples, wrong = read_run_examples(config)
    problems += wrong
    if not wrong:
        problems += count_problems(config, examples.train, examples.held_out)
        problems += answer_problems(config, _scored(config, examples))
        problems += gym_row_problems(config, examples)
        problems += run_token_problems(config, examples, special_tokens_of(config.policy.tokenizer.name))
        problems += unshown_problems(config, examples)
    per_step, rows = config.prompts_per_step, len(examples.train)
    steps, _ = last_step(config, rows)
    first = tuple(examples.train[:FIRST_ROWS])
    pairs = [*examples.train, *examples.held_out] if config.row_kind is RowKind.PAIRS else []
    equal = tuple(pair for pair in pairs if pair.rejected == (pair.solution or pair.answer))
    return DataPlan(rows, len(examples.held_out), per_step, steps, first, equal), problems


def data_warnings(plan: DataPlan | None) -> Iterator[Problem]:
    """Yield pairs that teach nothing."""
    if plan is None or not plan.equal_pairs:
        return
    what = (
        f"{len(plan.equal_pairs)} of {plan.rows + plan.held_out} pairs have two equal answers, which teach nothing; "
        f"the first is {plan.equal_pairs[0].place}"
    )
    yield Problem("no-signal", "data.train", what, "leave them out")


def fetched(config: RunConfig) -> list[str]:
    """Return the data sets of the hub that the run fetches when it starts."""
    sources = (*config.train_sources.values(), *config.validation_sources.values())
    return list(dict.fromkeys(source.paths[0] for source in sources if is_fetched(source)))


def streamed(config: RunConfig) -> bool:
    """Return whether rows are read as they are needed."""
    return any(source.streaming for source in config.train_sources.values())


def _problems_of_what_is_here(config: RunConfig) -> list[Problem]:
    """Return problems of sources that are read now, not fetched or streamed, and of the texts of all."""
    problems: list[Problem] = []
    chat = config.data.apply_chat_template
    for path, source in (config.train_sources | config.validation_sources).items():
        if is_fetched(source) or source.streaming:
            problems += [problem.below(path) for problem in read_texts(source)[1]]
        else:
            kind = config.row_kind
            _, wrong = read_examples({path: source}, {}, kind, chat=chat)
            problems += wrong
    return problems


def last_step(config: RunConfig, rows: int) -> tuple[int, tuple[str, ...]]:
    """Return the step after which max_num_steps or max_num_epochs ends the run, and the paths of those that do.

    Rows of the last pass that fill no step are left over.
    """
    loop, name = config.loop, config.algorithm
    bounds = {f"{name}.max_num_steps": loop.max_num_steps}
    if loop.max_num_epochs is not None:
        bounds[f"{name}.max_num_epochs"] = loop.max_num_epochs * rows // config.prompts_per_step
    last = min(bounds.values())
    return last, tuple(path for path, bound in bounds.items() if bound == last)


def scored_examples(config: RunConfig) -> list[Example]:
    """Read the rows of the data set's files that env.math scores against; none where the files cannot be read."""
    if config.env.math is None or not config.data.from_files or fetched(config) or streamed(config):
        return []
    examples, wrong = read_run_examples(config)
    return [] if wrong else _scored(config, examples)


def gym_row_problems(config: RunConfig, examples: Examples) -> Iterator[Problem]:
    """Yield the first row that NeMo Gym's agents cannot play."""
    if config.env.nemo_gym is None:
        return
    for example in (*examples.train, *examples.held_out):
        if GYM_COLUMN not in example.columns:
            what = f"{example.place} has no {GYM_COLUMN}, and NeMo Gym's agents play the rows"
            yield Problem("missing", "data.train", what, "name rows of NeMo Gym's", ("env.nemo_gym",))
            return


def answer_problems(config: RunConfig, examples: Sequence[Example]) -> Iterator[Problem]:
    """Yield answers that env.math cannot score against, as far as their text tells."""
    if config.env.math is None or config.env.math.unparsable != "refuse":
        return
    wrong: list[str] = []
    for example in examples:
        _, why = gold_answer(example.answer, config.env.math.gold)
        if why is not None:
            wrong.append(wrong_answer(example.place, example.answer, why))
    yield from gold_problems(wrong)


def _scored(config: RunConfig, examples: Examples) -> list[Example]:
    """Return the rows whose prompts the policy answers."""
    train = examples.train if config.row_kind is RowKind.PROMPTS else []
    return train + (examples.held_out[: config.loop.max_val_samples] if config.loop.validates else [])


def chat_template_told(config: RunConfig) -> str | None:
    """Say whether prompts are shown in the chat template; None where agents, or a task of ours, decide that."""
    if not config.data.from_files or config.env.endpoint is not None:
        return None
    tokenizer = config.policy.tokenizer
    folder = local_folder(tokenizer.name) if tokenizer.name != "char" else None
    whose = "policy.tokenizer.chat_template" if tokenizer.chat_template is not None else tokenizer.name
    if config.data.apply_chat_template:
        return f"applied, that of {whose}"
    if tokenizer.chat_template is not None or (folder is not None and has_template(folder)):
        return f"not applied, though {whose} has one: data.apply_chat_template: true applies it"
    there = (
        "the tokenizer has none"
        if folder is not None or tokenizer.name == "char"
        else "prompts are plain text"
    )
    return f"not applied, {there}"


def template_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a tokenizer without a chat template where one is to be applied."""
    if not config.data.apply_chat_template or config.policy.tokenizer.chat_template is not None:
        return
    name = config.policy.tokenizer.name
    folder = local_folder(name)
    if name == "char" or (folder is not None and not has_template(folder)):
        yield Problem(
            "requires",
            "data.apply_chat_template",
            f"true needs a chat template, and {_TOKENIZER}: {name} has none",
            "name a tokenizer that has one (chat_template in its tokenizer_config.json), or set it to false",
        )


def has_template(folder: Path) -> bool:
    """Return whether the tokenizer in a folder has a chat template, as far as its files tell."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        settings = read_json(folder / "tokenizer_config.json", finite=False)
    except (OSError, ValueError):
        return (
            True  # reported as what is wrong with the tokenizer, or left to the library that reads its format
        )
    return isinstance(settings, dict) and bool(cast("dict[str, object]", settings).get("chat_template"))
