"""Llama and the families that vary it: Mistral, Qwen 2 and 3 and, with experts in every layer, Mixtral and Qwen 3."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.models.family import (
    MLP_BIAS,
    OUTPUT_BIAS,
    WINDOW,
    WINDOW_SWITCH,
    Family,
    HFConfig,
    Refusal,
)
from nemo_rl_mcore.models.weights import ATTENTION, experts


def _problems_of_shares(values: HFConfig) -> Iterator[Problem]:
    """Yield a single expert a token where shares are made to sum to 1, as those of Mixtral always are.

    ModelConfig refuses it too, in words for a model of one's own: here the architecture is that of the weights.
    """
    of_qwen, sums_to_1 = values["model_type"] == "qwen3_moe", values.get("norm_topk_prob")
    if values.get("num_experts_per_tok") != 1 or (of_qwen and not sums_to_1):
        return
    which = f"qwen3_moe model with norm_topk_prob: {sums_to_1}" if of_qwen else "mixtral model"
    what = f"1 of a {which} gives every expert the share 1, so that the router has no gradient"
    remedy = "use a model with more experts per token" + (", or norm_topk_prob: false" if of_qwen else "")
    yield Problem("no-signal", "num_experts_per_tok", what, remedy)


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
            "intermediate_size": model.expert_ffn_size,
            "router_aux_loss_coef": origin.get("router_aux_loss_coef", model.moe_aux_loss_coeff),
        },
        problems=_problems_of_shares,
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
        # Scores that are made to sum to 1 after the selection are a softmax over the selected experts.
        read=lambda values: {"moe_router_pre_softmax": not values["norm_topk_prob"]},
        write=lambda model, origin: {
            "moe_intermediate_size": model.expert_ffn_size,
            "norm_topk_prob": not model.moe_router_pre_softmax,
            "router_aux_loss_coef": origin.get("router_aux_loss_coef", model.moe_aux_loss_coeff),
        },
        problems=_problems_of_shares,
    ),
)
