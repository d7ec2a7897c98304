"""Configuration of evaluations: named sets of prompts, and how their answers are drawn and counted."""

from collections.abc import Iterator
from typing import Annotated, cast

from pydantic import BeforeValidator, Field

from nemo_rl_mcore.config.base import Float, IntTuple, NonNegativeFloat, PositiveInt, Problem, StrictModel
from nemo_rl_mcore.config.source import SourceConfig


def _without_removed(sets: object) -> object:
    if not isinstance(sets, dict):
        return sets
    return {name: source for name, source in cast("dict[object, object]", sets).items() if source is not None}


class EvalConfig(StrictModel):
    """What `nemo-rl-mcore eval` asks and how; data.validation may name the same sets."""

    sets: Annotated[dict[str, SourceConfig], BeforeValidator(_without_removed)]
    """Sources of prompts, each under a name that you choose; keys as of data.train; `NAME: null` removes a parent's."""
    num_tests_per_prompt: PositiveInt = 1
    """Answers to each prompt."""
    k_values: IntTuple = (1,)
    """The k of pass@k and maj@k, each at most num_tests_per_prompt."""
    temperature: NonNegativeFloat = 0.0
    """Divides the logits; 0 takes the most probable token."""
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this probability mass; 1 keeps all."""
    top_k: PositiveInt | None = None
    """Sample from this many most probable tokens; null keeps all."""
    max_new_tokens: PositiveInt | None = None
    """Tokens of an answer at most; null is policy.generation.max_new_tokens."""
    max_samples: PositiveInt | None = None
    """Prompts of each set, the first ones; null takes all."""
    save_path: str | None = None
    """The folder of the results; null is `eval` in logger.log_dir."""

    def problems(self) -> Iterator[Problem]:
        """Yield a section without sets, answers that are all the same, and a k that is not drawn."""
        if not self.sets:
            yield Problem(
                "missing",
                "sets",
                "holds no set",
                "name one, such as gsm8k: {dataset_name: gsm8k, split: test}",
            )
        for name in self.sets:
            if not name.replace("-", "_").isidentifier():
                yield Problem(
                    "not-allowed",
                    f"sets.{name}",
                    "is no name of a set",
                    "take letters, digits, - and _, and no digit first",
                )
        for name, source in self.sets.items():
            if source.repeat > 1:
                what = f"{source.repeat} takes each prompt for another one as often"
                remedy = "remove it, and set num_tests_per_prompt"
                yield Problem("incompatible", f"sets.{name}.repeat", what, remedy)
        if self.num_tests_per_prompt > 1 and self.temperature == 0:
            yield Problem(
                "incompatible",
                "temperature",
                f"0 gives the same answer num_tests_per_prompt: {self.num_tests_per_prompt} times",
                "set it above 0, or num_tests_per_prompt: 1",
                ("num_tests_per_prompt",),
            )
        wrong = [k for k in self.k_values if not 1 <= k <= self.num_tests_per_prompt]
        if wrong:
            yield Problem(
                "not-allowed",
                "k_values",
                f"{', '.join(map(str, wrong))} is not from 1 to num_tests_per_prompt: {self.num_tests_per_prompt}",
                "lower it, or raise num_tests_per_prompt",
                ("num_tests_per_prompt",),
            )
