"""Whether a data set has the rows that a run takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.master import RunConfig
from nemo_rl_mcore.config.shares import Shares
from nemo_rl_mcore.config.source import names_of
from nemo_rl_mcore.data.examples import Examples


def count_problems(config: RunConfig, examples: Examples) -> Iterator[Problem]:
    """Yield steps and validations that take more rows than there are, of all sources or of one with its weight."""
    key, needed, how = _rows_of_a_step(config)
    if needed > len(examples.train):
        yield Problem(
            key,
            f"the {needed} {how} are more than the {len(examples.train)} of data.train "
            f"({len(examples.held_out)} are for validation)",
            "lower it, or add rows",
        )
    elif (weights := config.source_weights) is not None:
        shares, rows = Shares(weights), Counter(example.source for example in examples.train)
        for source, path in enumerate(names_of(config.train_sources)):
            name = shares.names[source]
            share = shares.most(source, needed, config.prompts_per_step)
            if share > rows[name]:
                yield Problem(
                    f"{path}.weight",
                    f"its share of the {needed} {how} is {share}, more than the {rows[name]} rows of {name!r}",
                    f"lower it, lower {key}, or add rows",
                )
    yield from _held_out_problems(config, examples)


def _rows_of_a_step(config: RunConfig) -> tuple[str, int, str]:
    """The key that says how many rows a step takes, that number, and what they are."""
    if not isinstance(loop := config.loop, RolloutConfig):
        return "policy.train_global_batch_size", config.prompts_per_step, "rows of a step"
    key = f"{config.algorithm}.num_prompts_per_step"
    if not loop.use_dynamic_sampling:
        return key, config.prompts_per_step, "rows of a step"
    rounds = loop.dynamic_sampling_max_gen_batches
    return key, config.prompts_per_step * rounds, "rows that dynamic sampling may take in a step"


def _held_out_problems(config: RunConfig, examples: Examples) -> Iterator[Problem]:
    if not config.loop.validates:
        return
    batch, batches, held_out = (
        config.policy.train_global_batch_size,
        config.val_batches,
        len(examples.held_out),
    )
    needed = (
        ("max_val_samples", config.loop.max_val_samples, "", "lower it"),
        (
            "val_batches",
            batches * batch,
            f" ({batches} times policy.train_global_batch_size)",
            "lower one of the two",
        ),
    )
    for key, rows, product, lower in needed:
        if rows > held_out:
            yield Problem(
                f"{config.algorithm}.{key}",
                f"a validation takes {rows} rows{product}, and {held_out} are held out",
                f"{lower}, give data.validation or a larger data.train.split_validation_size, or turn validation off",
            )
