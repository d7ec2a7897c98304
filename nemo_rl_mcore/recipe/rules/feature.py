"""What a file of rules offers: its functions, by what they judge."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_config import RunConfig

PolicyRule = Callable[[PolicyConfig], Iterator[Problem]]
"""Its paths are relative to `policy`."""
RunRule = Callable[[RunConfig], Iterator[Problem]]


@dataclass(frozen=True)
class Rules:
    """The rules of a feature.

    of_models: hold of every model of a run, one that is only read included.
    of_policies: hold of a policy, and of every model that is trained as one is.
    of_runs: hold between the sections of a recipe.
    """

    of_models: tuple[PolicyRule, ...] = ()
    of_policies: tuple[PolicyRule, ...] = ()
    of_runs: tuple[RunRule, ...] = ()
