"""Build the environment that the section `env` describes, and run it in a process."""

from __future__ import annotations

import faulthandler
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from nemo_rl_mcore.config import EnvConfig
from nemo_rl_mcore.config.custom_code import HANDED, build, custom_code
from nemo_rl_mcore.config.data import SCORE_WITHIN_S, MathEnvConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.environment.functions import RewardFunctions
from nemo_rl_mcore.environment.games import (
    ArithmeticEnvironment,
    CalculatorEnvironment,
    GuessNumberEnvironment,
)
from nemo_rl_mcore.environment.interface import (
    Environment,
    EnvironmentInterface,
    EnvironmentReturn,
    ScoresAnswers,
    number_each,
    number_of,
    read_return,
    replies_of,
)
from nemo_rl_mcore.environment.mathematics import MathEnvironment
from nemo_rl_mcore.environment.turns import Reply, Turn
from nemo_rl_mcore.errors import CustomCodeError

_KEY = "env.custom.type"
_STACK_AT = 0.9
"""Share of the deadline after which a process writes its stack to standard error."""


def make_environment(config: EnvConfig) -> Environment:
    """Build a recipe's environment; ValueError names the key of one that cannot be built.

    The `step` of a user's class takes precedence over its `score`.
    """
    unscored = config.unscored == "drop"
    if config.guess_number is not None:
        return GuessNumberEnvironment()
    if config.calculator is not None:
        return CalculatorEnvironment()
    if config.math is not None:
        return math_environment(config.math)
    if config.rewards is not None:
        return RewardFunctions(config.rewards, unscored=unscored)
    if (own := config.custom) is not None and own.type is not None:
        environment = build(own.type, _KEY, own.args, needs=("score|step",))
        if hasattr(environment, "step"):
            return _OwnSteps(cast("EnvironmentInterface", environment), own.type, unscored)
        return _OwnScores(cast("ScoresAnswers", environment), own.type, unscored)
    return ArithmeticEnvironment()


def math_environment(config: MathEnvConfig) -> MathEnvironment:
    return MathEnvironment(SCORE_WITHIN_S, config.gold, config.response, config.unparsable)


@dataclass(frozen=True)
class _OwnSteps:
    """A user's class, checked against the contract of `EnvironmentInterface`."""

    environment: EnvironmentInterface
    path: str
    unscored: bool

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        name = f"{_KEY}: {self.path}.step"
        with custom_code(name):
            returned = self.environment.step(message_log_batch, metadata)
        try:
            replies = read_return(returned, len(message_log_batch), {})
            if not self.unscored and any(reply.unscored for reply in replies):
                number_of(None, unscored=False)  # raises
        except Exception as error:
            wanted = f"{name} returned no EnvironmentReturn of {len(message_log_batch)} replies"
            what = f"{wanted}: {type(error).__name__}: {error}"
            raise CustomCodeError(what, code="environment-return") from error
        return returned


@dataclass(frozen=True)
class _OwnScores:
    """A user's class, checked against the contract of `ScoresAnswers`."""

    environment: ScoresAnswers
    path: str
    unscored: bool

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], finished: Sequence[bool]
    ) -> list[float | None]:
        name = f"{_KEY}: {self.path}"
        with custom_code(f"{name}.score"):
            given = self.environment.score(prompts, responses, finished)
        return number_each(name, given, [prompt.index for prompt in prompts], unscored=self.unscored)


class EnvironmentProcess:
    """Runs an environment in its own process, in the main thread: math-verify enforces its time limits by a signal.

    code: the user's classes and functions that are in no module, by import path.
    """

    def __init__(self, config: EnvConfig, code: Mapping[str, object]) -> None:
        HANDED.update(code)
        self._environment = make_environment(config)
        self._weights = config.reward_weights or {}

    def replies(self, turns: Sequence[Turn], within_s: float) -> list[Reply]:
        """Return the replies, see `replies_of`; within_s: limit at which the process will be killed."""
        faulthandler.dump_traceback_later(_STACK_AT * within_s)
        try:
            return replies_of(self._environment, turns, self._weights)
        finally:
            faulthandler.cancel_dump_traceback_later()
