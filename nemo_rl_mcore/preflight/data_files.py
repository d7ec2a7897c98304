"""What the data set of a run tells on paper: rows, steps, and what is wrong with its files or its class."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.hf.hub import local_folder
from nemo_rl_mcore.config.master import RunConfig
from nemo_rl_mcore.data.jsonl import Example, Examples, read_examples
from nemo_rl_mcore.preflight.answer_kinds import gold_answer, gold_problems, wrong_answer
from nemo_rl_mcore.strict_json import read_json

_TOKENIZER = "policy.tokenizer.name"


@dataclass(frozen=True)
class DataPlan:
    """How long the files of a data set last; rows that are dropped for their length are still counted."""

    rows: int
    held_out: int
    rows_per_step: int
    steps: int

    @property
    def steps_per_epoch(self) -> float:
        """Steps of a pass over the rows; a step may begin in one pass and end in the next."""
        return self.rows / self.rows_per_step


def examine_data(config: RunConfig) -> tuple[DataPlan | None, list[Problem]]:
    """Read the data set's files; None where it has none, for such a data set does not end."""
    problems = [*template_problems(config)]
    if not config.data.from_files:
        return None, problems
    examples, wrong = read_examples(config.data, config.row_kind)
    problems += [problem.below("data") for problem in wrong]
    if not wrong:
        problems += _train_problems(config, examples)
        problems += _held_out_problems(config, examples)
        problems += answer_problems(config, _scored(config, examples))
    per_step, rows = config.prompts_per_step, len(examples.train)
    steps = steps_of_epochs(config, rows)
    return DataPlan(rows, len(examples.held_out), per_step, steps), problems


def steps_of_epochs(config: RunConfig, rows: int) -> int:
    """Steps until max_num_steps or the rows of max_num_epochs passes end the run; what fills no step is left over."""
    loop = config.loop
    return min(loop.max_num_steps, loop.max_num_epochs * rows // config.prompts_per_step)


def _train_problems(config: RunConfig, examples: Examples) -> Iterator[Problem]:
    key = "policy.train_global_batch_size"
    needed, how = config.prompts_per_step, "rows of a step"
    if isinstance(loop := config.loop, RolloutConfig):
        key = f"{config.algorithm}.num_prompts_per_step"
        if loop.use_dynamic_sampling:
            needed *= loop.dynamic_sampling_max_gen_batches
            how = "rows that dynamic sampling may take in a step"
    if needed > len(examples.train):
        yield Problem(
            key,
            f"the {needed} {how} are more than the {len(examples.train)} of data.train "
            f"({len(examples.held_out)} are for validation)",
            "lower it, or add rows",
        )


def _held_out_problems(config: RunConfig, examples: Examples) -> Iterator[Problem]:
    if not config.loop.validates:
        return
    needed = {f"{config.algorithm}.max_val_samples": config.loop.max_val_samples}
    if config.val_batches:
        needed[f"{config.algorithm}.val_batches"] = config.val_batches * config.policy.train_global_batch_size
    for key, rows in needed.items():
        if rows > len(examples.held_out):
            yield Problem(
                key,
                f"a validation takes {rows} rows, and {len(examples.held_out)} are held out",
                "lower it, give data.validation or a larger data.train.split_validation_size, or turn validation off",
            )


def scored_examples(config: RunConfig) -> list[Example]:
    """Read the rows of the data set's files that env.math scores against; none where the files cannot be read."""
    if config.env.math is None or not config.data.from_files:
        return []
    examples, wrong = read_examples(config.data, config.row_kind)
    return [] if wrong else _scored(config, examples)


def answer_problems(config: RunConfig, examples: Sequence[Example]) -> Iterator[Problem]:
    """Yield answers that env.math cannot score against, as far as their text tells."""
    if config.env.math is None:
        return
    wrong: list[str] = []
    for example in examples:
        _, why = gold_answer(example.answer, config.env.math.gold)
        if why is not None:
            wrong.append(wrong_answer(example.place, example.answer, why))
    yield from gold_problems(wrong)


def _scored(config: RunConfig, examples: Examples) -> list[Example]:
    """The rows whose prompts the policy answers."""
    train = examples.train if config.row_kind is RowKind.PROMPTS else []
    return train + (examples.held_out[: config.loop.max_val_samples] if config.loop.validates else [])


def template_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a tokenizer without a chat template where one is to be applied."""
    if not config.data.apply_chat_template:
        return
    name = config.policy.tokenizer.name
    folder = local_folder(name)
    if name == "char" or (folder is not None and not has_template(folder)):
        yield Problem(
            "data.apply_chat_template",
            f"true needs a chat template, and {_TOKENIZER}: {name} has none",
            "name a tokenizer that has one (chat_template in its tokenizer_config.json), or set it to false",
        )


def has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        settings = read_json(folder / "tokenizer_config.json", finite=False)
    except (OSError, ValueError):
        return (
            True  # reported as what is wrong with the tokenizer, or left to the library that reads its format
        )
    return isinstance(settings, dict) and bool(cast("dict[str, object]", settings).get("chat_template"))
