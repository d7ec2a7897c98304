"""Converts NeMo RL recipes: `nemo-rl-mcore migrate`."""
