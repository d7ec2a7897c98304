"""Arguments that vLLM's engines get besides those that this package sets."""

from collections.abc import Iterator, Mapping

from nemo_rl_mcore.config.base import Problem

_SET_HERE: Mapping[str, str] = {
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer.name",
    "dtype": "policy.generation.vllm_cfg.precision",
    **{
        key: f"policy.generation.vllm_cfg.{key}"
        for key in (
            *("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization"),
            *("max_model_len", "max_num_seqs"),
            *("kv_cache_memory_bytes", "enforce_eager"),
        )
    },
    "enable_expert_parallel": "policy.generation.vllm_cfg.expert_parallel_size",
    **dict.fromkeys(
        ("distributed_executor_backend", "nnodes", "node_rank", "master_addr", "master_port"), ""
    ),
    "quantization": "policy.generation.vllm_cfg.precision",
    "quantization_config": "policy.generation.vllm_cfg.quantization_ignored_layer_kws",
    "kv_cache_dtype": "policy.generation.vllm_cfg.kv_cache_dtype",
    "max_logprobs": "",
    "logprobs_mode": "",
    "load_format": "",
    "skip_tokenizer_init": "",
    "enable_sleep_mode": "policy.generation.colocated.enabled",
    "worker_extension_cls": "",
    "worker_cls": "",
    "disable_log_stats": "",
    "seed": "seed",
}
"""What an engine is built with, and the key that says it, if one does."""
_OTHER_ANSWERS = (
    *(
        "hf_overrides",
        "hf_config_path",
        "rope_scaling",
        "rope_theta",
        "override_generation_config",
    ),
    *(
        "generation_config",
        "logits_processors",
        "logits_processor_pattern",
        "calculate_kv_scales",
    ),
    *("speculative_config", "speculative_model", "enable_lora", "lora_modules", "disable_sliding_window"),
    *(
        "enable_return_routed_experts",
        "sliding_window",
        "quantization_param_path",
        "revision",
        "trust_remote_code",
    ),
)
"""What changes the distribution that is sampled, or has weights that no refit sends."""
_OTHER_LAYOUTS = ("data_parallel_size", "decode_context_parallel_size", "enable_eplb")
"""What spreads an engine over more devices than it is given."""


def kwargs_problems(given: Mapping[str, object] | None) -> Iterator[Problem]:
    """Yield arguments that are set elsewhere, or would give other answers than training expects."""
    for name in given or {}:
        path = f"vllm_kwargs.{name}"
        if name in _SET_HERE:
            key = _SET_HERE[name]
            remedy = f"set {key}" if key else "remove it"
            yield Problem("not-allowed", path, "is set by this package", remedy, (key,) if key else ())
        elif name in _OTHER_ANSWERS:
            what = "changes the distribution that is sampled, which training computes without it"
            yield Problem("not-supported", path, what, "remove it")
        elif name in _OTHER_LAYOUTS:
            what = "spreads an engine over devices that it is not given"
            yield Problem("not-supported", path, what, "remove it; vllm_cfg has the sizes of its layout")


def is_passed_on(name: str) -> bool:
    """Return whether vLLM gets an argument of that name as it is."""
    return name not in {*_SET_HERE, *_OTHER_ANSWERS, *_OTHER_LAYOUTS}
