"""vLLM as the generation engine.

`engine` and `worker_extension` run in the engine's process, which never imports Megatron.
"""
