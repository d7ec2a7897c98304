"""vLLM as the generation engine.

`engine` and `worker_extension` run in the engine's process, which never imports Megatron; `buckets` and `transports`
carry weights there. The Ray side is `workers.vllm_worker`, `workers.vllm_generation` and `workers.ray_engines`.
"""
