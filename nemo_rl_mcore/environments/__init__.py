"""Verifiable rewards."""

from nemo_rl_mcore.environments.arithmetic import ArithmeticEnvironment
from nemo_rl_mcore.environments.mathematics import MathEnvironment
from nemo_rl_mcore.environments.registry import make_environment

__all__ = ["ArithmeticEnvironment", "MathEnvironment", "make_environment"]
