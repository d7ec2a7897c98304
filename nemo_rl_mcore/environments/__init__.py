"""Verifiable rewards."""

from nemo_rl_mcore.environments.arithmetic import ArithmeticEnvironment, exact_match_accuracy
from nemo_rl_mcore.environments.registry import make_environment

__all__ = ["ArithmeticEnvironment", "exact_match_accuracy", "make_environment"]
