"""What the data set of a run tells on paper: rows, steps, and what is wrong with its files or its class."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.data.examples import (
    Examples,
    Prompt,
    count_problems,
    last_step,
    read_examples,
    read_run_examples,
    read_texts,
    run_token_problems,
)
from nemo_rl_mcore.data.hub import local_folder
from nemo_rl_mcore.data.row_readers import GYM_COLUMN
from nemo_rl_mcore.data.rows import is_fetched
from nemo_rl_mcore.data.strict_json import read_json
from nemo_rl_mcore.data.tokenizer_folder import special_tokens_of
from nemo_rl_mcore.tools.check.chat_template import unshown_problems

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
    first: tuple[Prompt, ...] = ()
    equal_pairs: tuple[Prompt, ...] = ()


def examine_data(config: RunConfig) -> tuple[DataPlan | None, list[Problem]]:
    """Read the data set's files; None where its rows cannot be counted: they have no end, or are fetched later.

    Among the problems are warnings.
    """
    problems = [*template_problems(config)]
    if not config.data.from_files:
        texts = config.data.default
        return None, problems + [one.below("data.default") for one in (read_texts(texts)[1] if texts else ())]
    if fetched(config) or any(source.streaming for source in config.train_sources.values()):
        for path, source in (config.train_sources | config.validation_sources).items():
            if is_fetched(source) or source.streaming:
                problems += [problem.below(path) for problem in read_texts(source)[1]]
            else:
                chat = config.data.apply_chat_template
                problems += read_examples({path: source}, {}, config.row_kind, chat=chat)[1]
        return None, problems
    examples, wrong = read_run_examples(config)
    problems += wrong
    if not wrong:
        problems += count_problems(config, examples.train, examples.held_out)
        problems += _gym_row_problems(config, examples)
        problems += run_token_problems(config, examples, special_tokens_of(config.policy.tokenizer.name))
        problems += unshown_problems(config, examples)
    rows = len(examples.train)
    steps, _ = last_step(config, rows)
    first = tuple(examples.train[:FIRST_ROWS])
    pairs = [*examples.train, *examples.held_out] if config.row_kind is RowKind.PAIRS else []
    equal = tuple(pair for pair in pairs if pair.rejected == (pair.solution or pair.answer))
    return DataPlan(rows, len(examples.held_out), config.prompts_per_step, steps, first, equal), problems


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


def _gym_row_problems(config: RunConfig, examples: Examples) -> Iterator[Problem]:
    """Yield the first row that NeMo Gym's agents cannot play."""
    rows = (*examples.train, *examples.held_out) if config.env.nemo_gym is not None else ()
    lacking = next((row for row in rows if GYM_COLUMN not in row.columns), None)
    if lacking is not None:
        what = f"{lacking.place} has no {GYM_COLUMN}, and NeMo Gym's agents play the rows"
        yield Problem("missing", "data.train", what, "name rows of NeMo Gym's", ("env.nemo_gym",))


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
    known = folder is not None or tokenizer.name == "char"
    return f"not applied, {'the tokenizer has none' if known else 'prompts are plain text'}"


def template_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a tokenizer without a chat template where one is to be applied."""
    if not config.data.apply_chat_template or config.policy.tokenizer.chat_template is not None:
        return
    name = config.policy.tokenizer.name
    folder = local_folder(name)
    if name == "char" or (folder is not None and not has_template(folder)):
        what = f"true needs a chat template, and policy.tokenizer.name: {name} has none"
        remedy = (
            "name a tokenizer that has one (chat_template in its tokenizer_config.json), or set it to false"
        )
        yield Problem("requires", "data.apply_chat_template", what, remedy)


def has_template(folder: Path) -> bool:
    """Return whether the tokenizer in a folder has a chat template, as far as its files tell."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        settings = read_json(folder / "tokenizer_config.json", finite=False)
    except (OSError, ValueError):
        # Reported as what is wrong with the tokenizer, or left to the library that reads its format.
        return True
    return isinstance(settings, dict) and bool(cast("dict[str, object]", settings).get("chat_template"))
