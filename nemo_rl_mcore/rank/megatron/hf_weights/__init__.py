"""Hugging Face weights in and out of a sharded Megatron model."""
