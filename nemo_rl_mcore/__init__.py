"""A Megatron-Core policy worker for RL post-training. Importing this package imports no framework."""

__version__ = "0.1.0"
