"""Verifiable rewards."""

from nemo_rl_mcore.environments.arithmetic import ArithmeticEnvironment
from nemo_rl_mcore.environments.golds import require_answers, require_golds, require_golds_run_first
from nemo_rl_mcore.environments.mathematics import MathEnvironment
from nemo_rl_mcore.environments.registry import make_environment

__all__ = [
    "ArithmeticEnvironment",
    "MathEnvironment",
    "make_environment",
    "require_answers",
    "require_golds",
    "require_golds_run_first",
]
