"""Configuration of evaluations: named sets of prompts, and how their answers are drawn and counted."""

from typing import Annotated, cast

from pydantic import BeforeValidator

from nemo_rl_mcore.config.base import IntTuple, NonNegativeFloat, PositiveInt, Rule
from nemo_rl_mcore.config.generation import SamplingFiltersConfig
from nemo_rl_mcore.config.source import SourceConfig


def _without_removed(sets: object) -> object:
    if not isinstance(sets, dict):
        return sets
    return {name: source for name, source in cast("dict[object, object]", sets).items() if source is not None}


class EvalConfig(SamplingFiltersConfig):
    """What `nemo-rl-mcore eval` asks and how; data.validation may name the same sets."""

    sets: Annotated[dict[str, SourceConfig], BeforeValidator(_without_removed)]
    """Sources of prompts, each under a name that you choose; keys as of data.train; `NAME: null` removes a parent's."""
    num_tests_per_prompt: PositiveInt = 1
    """Answers to each prompt."""
    k_values: IntTuple = (1,)
    """The k of pass@k and maj@k, each at most num_tests_per_prompt."""
    temperature: NonNegativeFloat = 0.0
    """Divides the logits; 0 takes the most probable token."""
    max_new_tokens: PositiveInt | None = None
    """Tokens of an answer at most; null is policy.generation.max_new_tokens."""
    max_samples: PositiveInt | None = None
    """Prompts of each set, the first ones; null takes all."""
    save_path: str | None = None
    """The folder of the results; null is `eval` in logger.log_dir."""

    rules = (
        Rule(
            "missing",
            "sets",
            lambda own: not own.sets,
            fix="name one, such as gsm8k: {dataset_name: gsm8k, split: test}",
            says="holds no set",
        ),
        lambda own: (
            Rule(
                "not-allowed",
                f"sets.{name}",
                when=not name.replace("-", "_").isidentifier(),
                fix="take letters, digits, - and _, and no digit first",
                says="is no name of a set",
            )
            for name in own.sets
        ),
        lambda own: (
            Rule(
                "incompatible",
                f"sets.{name}.repeat",
                when=source.repeat > 1,
                fix="remove it, and set num_tests_per_prompt",
                why="it takes each prompt for another one as often",
            )
            for name, source in own.sets.items()
        ),
        Rule(
            "incompatible",
            "temperature",
            lambda own: own.num_tests_per_prompt > 1 and own.temperature == 0,
            ("num_tests_per_prompt",),
            "set it above 0, or num_tests_per_prompt: 1",
            "all answers would be the same",
        ),
        Rule(
            "not-allowed",
            "k_values",
            lambda own: any(not 1 <= k <= own.num_tests_per_prompt for k in own.k_values),
            ("num_tests_per_prompt",),
            "give numbers from 1 to num_tests_per_prompt, or raise that",
        ),
    )
