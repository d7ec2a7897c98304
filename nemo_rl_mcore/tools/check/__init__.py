"""What is learnt of a run, its files and its machines before torch, Ray or Megatron is imported."""

from nemo_rl_mcore.tools.check.plan import Plan, preflight

__all__ = ["Plan", "preflight"]
