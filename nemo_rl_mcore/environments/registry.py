"""From the name of a section of `env` to the environment."""

from __future__ import annotations

from collections.abc import Callable

from nemo_rl_mcore.environments.arithmetic import ArithmeticEnvironment

_ENVIRONMENTS: dict[str, Callable[[], ArithmeticEnvironment]] = {"arithmetic": ArithmeticEnvironment}


def make_environment(name: str) -> ArithmeticEnvironment:
    """Build the environment called `name`; ValueError lists the known names."""
    if name not in _ENVIRONMENTS:
        raise ValueError(f"env: unknown environment {name!r}; known: {', '.join(_ENVIRONMENTS)}")
    return _ENVIRONMENTS[name]()
