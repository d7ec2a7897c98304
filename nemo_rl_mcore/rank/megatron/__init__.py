"""The backend on Megatron-Core, its only importer. Places of Megatron in comments are paths below `megatron/core/`."""
