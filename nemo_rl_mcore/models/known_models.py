"""The config.json of some models of the Hugging Face hub, as far as it says how they are built.

With it a recipe that names one of them is checked before anything is downloaded; the downloaded config.json is compared
when the weights are loaded.
"""

from collections.abc import Mapping

_QWEN2: dict[str, object] = {
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
_QWEN2_SMALL = _QWEN2 | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_QWEN2_LARGE = _QWEN2 | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
_QWEN_MATH = {"max_position_embeddings": 4096, "rope_theta": 10000.0}
_QWEN3: dict[str, object] = {
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
_QWEN3_1_7B = _QWEN3 | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
_QWEN3_4B = _QWEN3 | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": True,
}
_NEMOTRON_H: dict[str, object] = {
    "model_type": "nemotron_h",
    "head_dim": 128,
    "mamba_num_heads": 128,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 131072,
    "vocab_size": 131072,
    "tie_word_embeddings": False,
}
_NEMOTRON_NANO_V2 = _NEMOTRON_H | {
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "mamba_head_dim": 80,
}
_NEMOTRON_NANO_12B_V2 = _NEMOTRON_NANO_V2 | {
    "hidden_size": 5120,
    "intermediate_size": 20480,
    "num_hidden_layers": 62,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
}
_NEMOTRON_3_NANO = _NEMOTRON_H | {
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "max_position_embeddings": 262144,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_MOONLIGHT: dict[str, object] = {
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "vocab_size": 163840,
    "tie_word_embeddings": False,
}
_GPT_OSS_20B: dict[str, object] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "quantization_config": {"quant_method": "mxfp4"},
    "vocab_size": 201088,
    "tie_word_embeddings": False,
}
_LLAMA3: dict[str, object] = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}


def _llama3_scaling(factor: float) -> dict[str, object]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_LLAMA31_8B = _LLAMA3 | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "rope_scaling": _llama3_scaling(8.0),
    "tie_word_embeddings": False,
}
_LLAMA32_1B = _LLAMA3 | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "rope_scaling": _llama3_scaling(32.0),
    "tie_word_embeddings": True,
}

KNOWN_MODELS: Mapping[str, Mapping[str, object]] = {
    "Qwen/Qwen2.5-1.5B": _QWEN2_SMALL | {"max_position_embeddings": 131072},
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN2_SMALL | {"max_position_embeddings": 32768},
    "Qwen/Qwen2.5-7B": _QWEN2_LARGE | {"max_position_embeddings": 131072},
    "Qwen/Qwen2.5-7B-Instruct": _QWEN2_LARGE | {"max_position_embeddings": 32768},
    "Qwen/Qwen2.5-Math-1.5B": _QWEN2_SMALL | _QWEN_MATH,
    "Qwen/Qwen2.5-Math-7B": _QWEN2_LARGE | _QWEN_MATH,
    "Qwen/Qwen3-0.6B": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-1.7B": _QWEN3_1_7B,
    "Qwen/Qwen3-4B": _QWEN3_4B,
    "Qwen/Qwen3-4B-Base": _QWEN3_4B | {"max_position_embeddings": 32768},
    "Qwen/Qwen3-8B": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "Qwen/Qwen3-30B-A3B": _QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "meta-llama/Llama-3.1-8B": _LLAMA31_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA31_8B,
    "meta-llama/Llama-3.2-1B": _LLAMA32_1B,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA32_1B,
    "moonshotai/Moonlight-16B-A3B": _MOONLIGHT,
    "moonshotai/Moonlight-16B-A3B-Instruct": _MOONLIGHT,
    "openai/gpt-oss-120b": _GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128},
    "openai/gpt-oss-20b": _GPT_OSS_20B,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _NEMOTRON_3_NANO,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16": _NEMOTRON_3_NANO,
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": _NEMOTRON_3_NANO
    | {
        "hidden_size": 4096,
        "intermediate_size": 2688,
        "num_hidden_layers": 88,
        "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*"
        "EMEMEMEME",
        "mamba_num_heads": 128,
        "n_routed_experts": 512,
        "num_experts_per_tok": 22,
        "moe_intermediate_size": 2688,
        "moe_shared_expert_intermediate_size": 5376,
        "moe_latent_size": 1024,
        "num_nextn_predict_layers": 1,
        "routed_scaling_factor": 5.0,
    },
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": _NEMOTRON_NANO_V2
    | {
        "hidden_size": 4480,
        "intermediate_size": 15680,
        "num_hidden_layers": 56,
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    },
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2": _NEMOTRON_NANO_12B_V2,
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2-Base": _NEMOTRON_NANO_12B_V2,
    "mistralai/Mistral-7B-v0.3": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32768,
    },
}
