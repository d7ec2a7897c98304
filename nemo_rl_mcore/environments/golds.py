"""The answers of a run's data, held to what its environment can score against before any rank starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.master import RunConfig
from nemo_rl_mcore.data.datasets import Prompt, PromptSource
from nemo_rl_mcore.data.epochs import EpochSource
from nemo_rl_mcore.environments.registry import math_environment
from nemo_rl_mcore.preflight.data_files import scored_examples
from nemo_rl_mcore.preflight.warm_start import recipes_run_first


def require_golds(config: RunConfig, source: PromptSource) -> None:
    """Raise ConfigError for answers that env.math cannot score against.

    A source that does not end is asked for its first step and its validation; later answers are held to the same
    when they are scored.
    """
    if config.env.math is not None:
        require_answers(config, list(_scored(config, source)))


def require_answers(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError for answers of the prompts that env.math cannot score against."""
    if config.env.math is not None:
        math_environment(config.env.math).require_answers(prompts)


def require_golds_run_first(config: RunConfig) -> None:
    """Hold the files of the recipes that a run has run first to the same; raises ConfigError."""
    for recipe in recipes_run_first(config):
        if recipe.env.math is not None:
            prompts = [Prompt(row.index, "", row.answer, place=row.place) for row in scored_examples(recipe)]
            math_environment(recipe.env.math).require_answers(prompts)


def _scored(config: RunConfig, source: PromptSource) -> Iterator[Prompt]:
    """The prompts that the policy answers."""
    if config.row_kind is RowKind.PROMPTS:
        ends = isinstance(source, EpochSource)
        yield from source.train if ends else source.train_batch(1, config.prompts_per_step)
    if config.loop.validates:
        yield from source.validation(config.loop.max_val_samples)
