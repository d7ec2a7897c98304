"""Checks a run, its files and its machines without importing torch, Ray or Megatron."""

from nemo_rl_mcore.tools.check.plan import Plan, preflight

__all__ = ["Plan", "preflight"]
