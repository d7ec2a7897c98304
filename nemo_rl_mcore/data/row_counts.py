"""Whether a data set has the rows that a run takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.shares import Shares
from nemo_rl_mcore.config.source import names_of
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.examples import Example

Rows = Sequence[Example] | Sequence[Prompt]


def require_enough_left(config: RunConfig, train: Rows, held_out: Rows) -> None:
    """Raise ConfigError where rows that are dropped for their length leave fewer than a run takes."""
    if problems := [*count_problems(config, train, held_out)]:
        raise ConfigError(
            Problem(
                "too-few-rows",
                problem.path,
                f"data.overlong: drop leaves too few rows: {problem.what}",
                problem.remedy,
            )
            for problem in problems
        )


def count_problems(config: RunConfig, train: Rows, held_out: Rows) -> Iterator[Problem]:
    """Yield steps and validations that take more rows than there are, of all sources or of one with its weight."""
    key, needed = config.prompts_key, config.prompts_per_step
    if needed > len(train):
        yield Problem(
            "too-few-rows",
            key,
            f"the {needed} rows of a step are more than the {len(train)} of data.train "
            f"({len(held_out)} are for validation)",
            "lower it, or add rows",
        )
    elif (weights := config.source_weights) is not None:
        shares, rows = Shares(weights), Counter(row.source for row in train)
        for source, path in enumerate(names_of(config.train_sources)):
            name = shares.names[source]
            share = shares.most(source, needed, config.prompts_per_step)
            if share > rows[name]:
                yield Problem(
                    "too-few-rows",
                    f"{path}.weight",
                    f"its share of the {needed} rows of a step is {share}, more than the {rows[name]} rows of {name!r}",
                    f"lower it, lower {key}, or add rows",
                )
    yield from held_out_problems(config, held_out)


def held_out_problems(config: RunConfig, held_out: Rows) -> Iterator[Problem]:
    """Yield validations without a row."""
    if not config.loop.validates:
        return
    asked = config.loop.max_val_samples
    needed = (
        ("max_val_samples", 1 if asked is None else min(asked, 1)),
        ("val_batches", 0 if config.given_rows is None else 1),
    )
    for key, rows in needed:
        if rows > len(held_out):
            yield Problem(
                "too-few-rows",
                f"{config.algorithm}.{key}",
                f"a validation takes one row or more, and {len(held_out)} are held out",
                "give data.validation or a larger data.train.split_validation_size, or turn validation off",
            )
