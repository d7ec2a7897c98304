"""Load Hugging Face weights into a sharded Megatron model, and export them from it."""
