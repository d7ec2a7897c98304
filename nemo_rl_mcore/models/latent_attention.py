"""The weights of latent attention, whose keys and values, and perhaps queries, are made of narrower latents.

What makes a latent is whole on each tensor-parallel rank, as Transformer Engine has it; what reads one is cut by heads.
"""

from collections.abc import Callable

from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.models.weights import (
    COLUMNS,
    DENSE_MLP,
    INPUT_NORM,
    POST_ATTENTION_NORM,
    REPLICATED,
    ROWS,
    SHARED_EXPERT,
    Layout,
    Shapes,
    Slot,
    experts,
)


def _of_attention(
    megatron: str,
    hugging_face: str,
    layout: Layout,
    shape: Callable[[ModelConfig], tuple[int, ...]],
    exists: Callable[[ModelConfig], bool] = lambda _: True,
) -> Slot:
    def shapes(model: ModelConfig) -> Shapes:
        return (shape(model),)

    return Slot(rf"self_attention\.{megatron}", (f"self_attn.{hugging_face}.weight",), layout, shapes, exists)


def _has_query_latent(model: ModelConfig) -> bool:
    return model.q_lora_rank is not None


def _query_rank(model: ModelConfig) -> int:
    return model.q_lora_rank or 0


def _queries(model: ModelConfig) -> int:
    return model.num_attention_heads * model.head_dim


LATENT_ATTENTION = (
    INPUT_NORM,
    _of_attention(
        r"linear_q_proj\.weight",
        "q_proj",
        ROWS,
        lambda model: (_queries(model), model.hidden_size),
        lambda model: not _has_query_latent(model),
    ),
    _of_attention(
        r"linear_q_down_proj\.weight",
        "q_a_proj",
        REPLICATED,
        lambda model: (_query_rank(model), model.hidden_size),
        _has_query_latent,
    ),
    _of_attention(
        r"(?:q_layernorm\.weight|linear_q_up_proj\.layer_norm_weight)",
        "q_a_layernorm",
        REPLICATED,
        lambda model: (_query_rank(model),),
        _has_query_latent,
    ),
    _of_attention(
        r"linear_q_up_proj\.weight",
        "q_b_proj",
        ROWS,
        lambda model: (_queries(model), _query_rank(model)),
        _has_query_latent,
    ),
    _of_attention(
        r"linear_kv_down_proj\.weight",
        "kv_a_proj_with_mqa",
        REPLICATED,
        lambda model: (model.kv_lora_rank + model.qk_pos_emb_head_dim, model.hidden_size),
    ),
    _of_attention(
        r"(?:kv_layernorm\.weight|linear_kv_up_proj\.layer_norm_weight)",
        "kv_a_layernorm",
        REPLICATED,
        lambda model: (model.kv_lora_rank,),
    ),
    _of_attention(
        r"linear_kv_up_proj\.weight",
        "kv_b_proj",
        ROWS,
        lambda model: (
            model.num_attention_heads * (model.qk_head_dim + model.v_head_dim),
            model.kv_lora_rank,
        ),
    ),
    _of_attention(
        r"linear_proj\.weight",
        "o_proj",
        COLUMNS,
        lambda model: (model.hidden_size, model.num_attention_heads * model.v_head_dim),
    ),
    POST_ATTENTION_NORM,
)
LATENT_LAYER = (*LATENT_ATTENTION, *DENSE_MLP, *experts(), *SHARED_EXPERT)
"""A layer, of which a model has what exists in it."""
