"""Rewards, and what takes part in episodes."""
