"""DeepSeek V3 and R1, Moonlight: latent attention, and dense layers before layers with routed and shared experts.

Latent attention computes keys and values, and optionally queries, from narrower latents. As in Transformer Engine,
each tensor-parallel rank has all weights that produce latents; weights that read latents are split by heads.
"""

from collections.abc import Iterator
from typing import cast

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.models.family import Family, HFConfig, Refusal
from nemo_rl_mcore.models.weights import (
    COLUMNS,
    DENSE_MLP,
    INPUT_NORM,
    POST_ATTENTION_NORM,
    REPLICATED,
    ROWS,
    SHARED_EXPERT,
    When,
    experts,
    slots,
)

_BEST_OF_A_GROUP = 2
"""Number of best experts whose scores rank a group."""


_HAS_QUERY_LATENT: When = lambda model: model.q_lora_rank is not None  # noqa: E731
_QUERY_NORM = r"(?:q_layernorm\.weight|linear_q_up_proj\.layer_norm_weight)"
_NORM = r"(?:kv_layernorm\.weight|linear_kv_up_proj\.layer_norm_weight)"
_ATTENTION = (
    INPUT_NORM,
    *slots(
        (r"linear_q_proj\.weight", "q_proj", ROWS, "queries hidden", lambda model: model.q_lora_rank is None),
        (r"linear_q_down_proj\.weight", "q_a_proj", REPLICATED, "query_latent hidden", _HAS_QUERY_LATENT),
        (_QUERY_NORM, "q_a_layernorm", REPLICATED, "query_latent", _HAS_QUERY_LATENT),
        (r"linear_q_up_proj\.weight", "q_b_proj", ROWS, "queries query_latent", _HAS_QUERY_LATENT),
        (r"linear_kv_down_proj\.weight", "kv_a_proj_with_mqa", REPLICATED, "latent_and_positions hidden"),
        (_NORM, "kv_a_layernorm", REPLICATED, "latent"),
        (r"linear_kv_up_proj\.weight", "kv_b_proj", ROWS, "keys_and_values latent"),
        (r"linear_proj\.weight", "o_proj", COLUMNS, "hidden values"),
        within=r"self_attention\.",
        named="self_attn.{}.weight",
    ),
    POST_ATTENTION_NORM,
)
LATENT_LAYER = (*_ATTENTION, *DENSE_MLP, *experts(), *SHARED_EXPERT)
"""All weights of a layer; a model has those that exist in it."""


def _number(values: HFConfig, key: str) -> int:
    """Return a number from config.json; 0 if it is null."""
    return cast("int", values.get(key) or 0)


def _read(values: HFConfig) -> dict[str, object]:
    dense, layers = _number(values, "first_k_dense_replace"), _number(values, "num_hidden_layers")
    shared = _number(values, "n_shared_experts") * _number(values, "moe_intermediate_size")
    groups = _number(values, "n_group") > max(1, _number(values, "topk_group"))
    return {
        "kv_channels": None,  # head_dim is the rotated part's size
        "num_query_groups": None,
        "q_lora_rank": values["q_lora_rank"],
        "moe_layer_freq": (0,) * dense + (1,) * (layers - dense) if dense else None,
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_router_topk_scaling_factor": values["routed_scaling_factor"],
        "moe_router_num_groups": values["n_group"] if groups else None,
        "moe_router_group_topk": values["topk_group"] if groups else None,
    }


def _write(model: ModelConfig, origin: HFConfig) -> dict[str, object]:
    shared = model.moe_shared_expert_intermediate_size or 0
    return {
        "num_key_value_heads": model.num_attention_heads,
        "head_dim": model.qk_pos_emb_head_dim,
        "q_lora_rank": model.q_lora_rank,
        "first_k_dense_replace": model.shape.dense_layers,
        "moe_intermediate_size": model.shape.expert_ffn_size,
        "n_shared_experts": shared // model.shape.expert_ffn_size,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "n_group": model.moe_router_num_groups or origin.get("n_group") or 1,
        "topk_group": model.moe_router_group_topk or origin.get("topk_group") or 1,
        "norm_topk_prob": model.moe_router_topk > 1,
        "num_nextn_predict_layers": 0,
    }


def _problems(values: HFConfig) -> Iterator[Problem]:
    for key, like in (("num_key_value_heads", "num_attention_heads"), ("head_dim", "qk_rope_head_dim")):
        if values.get(key) not in (None, values.get(like)):
            what = f"{values[key]!r} of a deepseek_v3 model is not {like}: {values.get(like)!r}"
            yield Problem("contradicts", key, what, "make them equal", (like,))
    if _number(values, "first_k_dense_replace") >= _number(values, "num_hidden_layers") > 0:
        what = f"{values['first_k_dense_replace']} leaves no layer of a deepseek_v3 model with experts"
        yield Problem("not-supported", "first_k_dense_replace", what, "lower it", ("num_hidden_layers",))
    chosen = _number(values, "num_experts_per_tok")
    if chosen > 1 and not values.get("norm_topk_prob"):
        what = "false of a deepseek_v3 model: shares of experts that do not sum to 1 are not supported"
        yield Problem("not-supported", "norm_topk_prob", what, "", ("num_experts_per_tok",))
    groups = max(1, _number(values, "topk_group"))
    if _number(values, "n_group") > groups and chosen // groups != _BEST_OF_A_GROUP:
        what = (
            f"{values.get('topk_group')} of a deepseek_v3 model is not half of num_experts_per_tok: {chosen} (its "
            f"groups are chosen by their best {_BEST_OF_A_GROUP} experts, Megatron's by as many as one gives)"
        )
        yield Problem("not-supported", "topk_group", what, "", ("num_experts_per_tok", "n_group"))


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    fields={
        "qk_layernorm": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    varied=(
        "kv_lora_rank",
        "moe_layer_freq",
        "moe_shared_expert_intermediate_size",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
    ),
    sizes={
        "num_moe_experts": "n_routed_experts",
        "moe_router_topk": "num_experts_per_tok",
        "moe_ffn_hidden_size": "moe_intermediate_size",
        "kv_lora_rank": "kv_lora_rank",
        "qk_head_dim": "qk_nope_head_dim",
        "qk_pos_emb_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
    },
    aliases={"num_local_experts": "n_routed_experts"},
    layer=LATENT_LAYER,
    # Layers that predict further tokens; no model with known weights has more than 4.
    predicting=lambda model: (
        rf"model\.layers\.({'|'.join(str(model.num_layers + one) for one in range(4))})\..+"
    ),
    fits=lambda model: (
        model.kv_lora_rank is not None
        and not (model.moe_shared_expert_intermediate_size or 0) % model.shape.expert_ffn_size
    ),
    defaults={
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
    },
    refusals=(
        Refusal("attention_bias", (False, None), "biases in the attention are not supported"),
        Refusal("rope_interleave", (True, None), "rotated pairs that are not neighbours are not supported"),
        Refusal("scoring_func", ("sigmoid", None), "other scores of experts are not supported"),
        Refusal("topk_method", ("noaux_tc", None), "other ways to choose experts are not supported"),
        Refusal("moe_layer_freq", (1, None), "dense layers between layers of experts are not supported"),
    ),
    read=_read,
    write=_write,
    problems=_problems,
)
