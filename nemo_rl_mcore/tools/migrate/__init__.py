"""From a recipe of NeMo RL to one of this package: `nemo-rl-mcore migrate`."""
