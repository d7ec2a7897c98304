"""Configuration of evaluations: named sets of prompts, and sampling of answers."""

from nemo_rl_mcore.config.base import NonNegativeFloat, PositiveInt, Rule
from nemo_rl_mcore.config.generation import SamplingFiltersConfig
from nemo_rl_mcore.config.source import SourceConfig


class EvalConfig(SamplingFiltersConfig):
    """Prompts and sampling of `nemo-rl-mcore eval`; data.validation may name the same sets.

    Results are written to the folder `eval` in logger.log_dir.
    """

    sets: dict[str, SourceConfig]
    """Sources of prompts by names of your choice, with data.train's keys; `NAME: null` removes an inherited set."""
    num_tests_per_prompt: PositiveInt = 1
    """Number n of answers per prompt; pass@k and maj@k are computed for k = 1, each power of two below n, and n."""
    temperature: NonNegativeFloat = 0.0
    """Divisor of the logits in sampling; 0 takes the most probable token."""

    rules = (
        Rule(
            "missing",
            "sets",
            lambda own: not own.sets,
            fix="name one, such as gsm8k: {dataset_name: gsm8k, split: test}",
            says="has no sets",
        ),
        lambda own: (
            Rule(
                "not-allowed",
                f"sets.{name}",
                when=not name.replace("-", "_").isidentifier(),
                fix="use letters, digits, - and _, and no digit as the first character",
                says="is not a valid set name",
            )
            for name in own.sets
        ),
        lambda own: (
            Rule(
                "incompatible",
                f"sets.{name}.repeat",
                when=source.repeat > 1,
                fix="remove it, and set num_tests_per_prompt",
                why="each repeated row would count as another prompt",
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
    )
