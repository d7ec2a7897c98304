"""The answers of a run's data, held to what its environment can score against before any rank starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.data.datasets import EpochSource, Prompt, PromptSource
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.environment.registry import math_environment

_LOOKED_AT = 1000
"""Answers that are read before a run that gives the others 0, some milliseconds each; a recipe may have a million."""


def hold_to_golds(config: RunConfig, source: PromptSource) -> PromptSource:
    """Give the source of what env.math can score against: without rows to drop, which are counted; zeros are told.

    A source that does not end is asked for its first step and its validation; later answers are held to the same
    when they are scored. Raises ConfigError for an answer that is refused.
    """
    math = config.env.math
    if math is None:
        return source
    scored = list(_scored(config, source))
    if math.unparsable == "refuse":
        require_answers(config, scored)
    elif math.unparsable == "zero":
        first = scored[:_LOOKED_AT]
        wrong = math_environment(math).wrong_answers(first)
        _tell(first, wrong, "each response to them scores 0")
    elif isinstance(source, EpochSource):
        wrong = math_environment(math).wrong_answers(scored)
        _tell(scored, wrong, "those rows are left out")
        kept = config.row_kind is not RowKind.PROMPTS
        return replace(
            source,
            train=[row for row in source.train if kept or row.answer not in wrong],
            held_out=[row for row in source.held_out if row.answer not in wrong],
        )
    return source


def _tell(prompts: Sequence[Prompt], wrong: Mapping[str, str], what: str) -> None:
    count = sum(prompt.answer in wrong for prompt in prompts)
    if count:
        shown = ", ".join(repr(answer[:40]) for answer in [*wrong][:3])
        write_line(
            sys.stderr,
            f"env.math.unparsable: nothing can equal the answers of {count} of {len(prompts)} rows ({shown}); {what}",
        )


def require_answers(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError for answers of the prompts that env.math cannot score against, unless the recipe takes them."""
    if config.env.math is not None and config.env.math.unparsable == "refuse":
        math_environment(config.env.math).require_answers(prompts)


def _scored(config: RunConfig, source: PromptSource) -> Iterator[Prompt]:
    """Yield the prompts that the policy answers."""
    if config.row_kind is RowKind.PROMPTS:
        ends = isinstance(source, EpochSource)
        yield from source.train if ends else source.train_batch(1, config.prompts_per_step)
    if config.loop.validates:
        yield from source.validation(config.loop.max_val_samples)
