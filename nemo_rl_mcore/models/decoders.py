"""Llama and the families that vary it: Mistral, Qwen 2 and 3 and, with MoE in every layer, Mixtral and Qwen 3."""

from nemo_rl_mcore.models.family import (
    MLP_BIAS,
    OUTPUT_BIAS,
    WINDOW,
    WINDOW_SWITCH,
    Family,
    Refusal,
)
from nemo_rl_mcore.models.weights import ATTENTION, experts

_BETWEEN = "dense layers between layers of experts are not supported"
DECODERS = (
    Family(
        "llama",
        "LlamaForCausalLM",
        defaults={"max_position_embeddings": 2048},
        refusals=(OUTPUT_BIAS, MLP_BIAS),
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 4096 * 32, "sliding_window": 4096},
        refusals=(WINDOW,),
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        fields={"moe_router_pre_softmax": False},
        sizes={"num_moe_experts": "num_local_experts", "moe_router_topk": "num_experts_per_tok"},
        layer=(*ATTENTION, *experts("block_sparse_moe", gate_up_down=("w1", "w3", "w2"))),
        defaults={
            **{"num_key_value_heads": 8, "max_position_embeddings": 4096 * 32, "rms_norm_eps": 1e-5},
            **{"rope_theta": 1e6, "num_experts_per_tok": 2, "num_local_experts": 8},
        },
        refusals=(
            WINDOW,
            Refusal("router_jitter_noise", (0.0, None), "noise on the router's input is not supported"),
        ),
        write=lambda model, origin: {
            "intermediate_size": model.shape.expert_ffn_size,
            "router_aux_loss_coef": origin.get("router_aux_loss_coef", model.moe_aux_loss_coeff),
        },
    ),
    Family(
        "qwen2",  # and 2.5
        "Qwen2ForCausalLM",
        fields={"add_qkv_bias": True},
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
        refusals=(WINDOW_SWITCH,),
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        fields={"qk_layernorm": True},
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
        refusals=(OUTPUT_BIAS, WINDOW_SWITCH),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        fields={"qk_layernorm": True},
        sizes={
            "num_moe_experts": "num_experts",
            "moe_router_topk": "num_experts_per_tok",
            "moe_ffn_hidden_size": "moe_intermediate_size",
        },
        aliases={"num_local_experts": "num_experts"},
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768, "norm_topk_prob": False},
        refusals=(
            OUTPUT_BIAS,
            WINDOW_SWITCH,
            Refusal("decoder_sparse_step", (1, None), _BETWEEN),
            Refusal("mlp_only_layers", ([], (), None), _BETWEEN),
        ),
        # Scores normalised to sum to 1 after selection equal a softmax over the selected experts.
        read=lambda values: {"moe_router_pre_softmax": not values["norm_topk_prob"]},
        write=lambda model, origin: {
            "moe_intermediate_size": model.shape.expert_ffn_size,
            "norm_topk_prob": not model.moe_router_pre_softmax,
            "router_aux_loss_coef": origin.get("router_aux_loss_coef", model.moe_aux_loss_coeff),
        },
    ),
)
