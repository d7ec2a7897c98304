"""From the section `env` to the environment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from nemo_rl_mcore.config import EnvConfig
from nemo_rl_mcore.config.data import MathEnvConfig
from nemo_rl_mcore.custom_code import build, custom_code
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.environments.arithmetic import ArithmeticEnvironment
from nemo_rl_mcore.environments.calculator import CalculatorEnvironment
from nemo_rl_mcore.environments.guess_number import GuessNumberEnvironment
from nemo_rl_mcore.environments.mathematics import MathEnvironment
from nemo_rl_mcore.errors import CustomCodeError
from nemo_rl_mcore.interfaces import Environment, ScoresAnswers


def make_environment(config: EnvConfig) -> Environment:
    """Build the environment of a recipe; ValueError names the key of one that cannot be."""
    if config.guess_number is not None:
        return GuessNumberEnvironment()
    if config.calculator is not None:
        return CalculatorEnvironment()
    if config.math is not None:
        return math_environment(config.math)
    if (own := config.custom) is not None:
        environment = build(own.type, "env.custom.type", own.args, needs=("score",))
        return _OwnEnvironment(cast("ScoresAnswers", environment), own.type)
    return ArithmeticEnvironment()


def math_environment(config: MathEnvConfig) -> MathEnvironment:
    """The environment of a section `env.math`; ValueError when the package is not there."""
    return MathEnvironment(config.timeout_s, config.gold, config.response)


@dataclass(frozen=True)
class _OwnEnvironment:
    """A class of the user's own, held to what `ScoresAnswers` promises."""

    environment: ScoresAnswers
    path: str

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], finished: Sequence[bool]
    ) -> list[float]:
        """See `ScoresAnswers.score`; CustomCodeError when the scores are not one finite number a response."""
        name = f"env.custom.type: {self.path}"
        with custom_code(f"{name}.score"):
            given = list(self.environment.score(prompts, responses, finished))
        if len(given) != len(responses):
            raise CustomCodeError(f"{name} gave {len(given)} scores of {len(responses)} responses")
        return [_reward(score, prompt, name) for score, prompt in zip(given, prompts, strict=True)]


def _reward(score: object, prompt: Prompt, name: str) -> float:
    try:
        reward = float(cast("float", score))
    except (TypeError, ValueError, RuntimeError) as error:
        raise CustomCodeError(f"{name} scored {score!r:.80} for prompt {prompt.index}: no number") from error
    if not math.isfinite(reward):
        raise CustomCodeError(f"{name} scored {reward} for prompt {prompt.index}")
    return reward
