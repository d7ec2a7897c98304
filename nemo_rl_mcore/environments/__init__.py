"""Verifiable rewards, and what takes part in episodes."""

from nemo_rl_mcore.environments.arithmetic import ArithmeticEnvironment
from nemo_rl_mcore.environments.calculator import CalculatorEnvironment
from nemo_rl_mcore.environments.golds import hold_to_golds, require_answers, require_golds_run_first
from nemo_rl_mcore.environments.guess_number import GuessNumberEnvironment
from nemo_rl_mcore.environments.mathematics import MathEnvironment
from nemo_rl_mcore.environments.registry import make_environment

__all__ = [
    "ArithmeticEnvironment",
    "CalculatorEnvironment",
    "GuessNumberEnvironment",
    "MathEnvironment",
    "hold_to_golds",
    "make_environment",
    "require_answers",
    "require_golds_run_first",
]
