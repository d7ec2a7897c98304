"""Qwen 3 with experts in every layer."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.models.family import OUTPUT_BIAS, WINDOW_SWITCH, Family, HFConfig, Refusal

_BETWEEN = "dense layers between layers of experts are not supported"
_DENSE_LAYERS = (
    Refusal("decoder_sparse_step", (1, None), _BETWEEN),
    Refusal("mlp_only_layers", ([], (), None), _BETWEEN),
)


def _read(values: HFConfig) -> dict[str, object]:
    # Scores that are made to sum to 1 after the selection are a softmax over the selected experts.
    return {"moe_router_pre_softmax": not values["norm_topk_prob"]}


def _write(model: ModelConfig, origin: HFConfig) -> dict[str, object]:
    return {
        "moe_intermediate_size": model.expert_ffn_size,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "router_aux_loss_coef": origin.get("router_aux_loss_coef", model.moe_aux_loss_coeff),
    }


def _problems(values: HFConfig) -> Iterator[Problem]:
    # ModelConfig refuses it too, in words for a model of one's own: here the architecture is that of the weights.
    if values.get("num_experts_per_tok") == 1 and values["norm_topk_prob"]:
        yield Problem(
            "no-signal",
            "num_experts_per_tok",
            f"1 of a qwen3_moe model with norm_topk_prob: {values['norm_topk_prob']} gives every expert the share 1, "
            "so that the router has no gradient",
            "use a model with norm_topk_prob: false, or with more experts per token",
        )


FAMILY = Family(
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
    refusals=(OUTPUT_BIAS, WINDOW_SWITCH, *_DENSE_LAYERS),
    read=_read,
    write=_write,
    problems=_problems,
)
