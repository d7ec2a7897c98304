"""The table of weights: what each is called in Megatron and in Hugging Face models, its layout and its shapes.

Megatron's local layers and Transformer Engine's name some of them differently; both are in the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nemo_rl_mcore.config import ModelConfig
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.megatron.hf_weights.layout import COLUMNS, GATED, QKV, REPLICATED, ROWS, Layout

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Slot:
    """One kind of weight, in a layer (or in an expert of it) or outside of the layers.

    megatron: a regular expression of its names in Megatron; its group, if any, is the number of the expert.
    hugging_face: the tensors it consists of. exists: whether a model has it.
    """

    megatron: str
    hugging_face: tuple[str, ...]
    layout: Layout
    shapes: Callable[[ModelConfig], Shapes]
    exists: Callable[[ModelConfig], bool] = lambda _: True
    of_expert: bool = False


@dataclass(frozen=True)
class Weight:
    """A weight of the whole model: its slot, and the layer and expert counted over all ranks."""

    slot: Slot
    layer: int | None = None
    expert: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return what its tensors are called in a Hugging Face model."""
        prefix = "" if self.layer is None else f"model.layers.{self.layer}."
        return tuple(prefix + name.format(expert=self.expert) for name in self.slot.hugging_face)


def _is_dense(model: ModelConfig) -> bool:
    return model.num_moe_experts is None


def _has_experts(model: ModelConfig) -> bool:
    return model.num_moe_experts is not None


def _vocabulary(model: ModelConfig) -> Shapes:
    return ((model.vocab_size, model.hidden_size),)


def _hidden(model: ModelConfig) -> Shapes:
    return ((model.hidden_size,),)


def _head(model: ModelConfig) -> Shapes:
    return ((model.head_dim,),)


def _qkv_rows(model: ModelConfig) -> Shapes:
    queries, keys = model.num_attention_heads * model.head_dim, model.query_groups * model.head_dim
    return ((queries,), (keys,), (keys,))


def _qkv(model: ModelConfig) -> Shapes:
    return tuple((*rows, model.hidden_size) for rows in _qkv_rows(model))


_ATTENTION = "self_attn."
_EXPERT = "mlp.experts.{expert}."
EMBEDDING = Slot(r"embedding\.word_embeddings\.weight", ("model.embed_tokens.weight",), ROWS, _vocabulary)
OUTPUT = Slot(
    r"output_layer\.weight",
    ("lm_head.weight",),
    ROWS,
    _vocabulary,
    exists=lambda model: not model.tie_word_embeddings,
)
FINAL_NORM = Slot(r"decoder\.final_layernorm\.weight", ("model.norm.weight",), REPLICATED, _hidden)
LAYER = (
    Slot(
        r"input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight",
        ("input_layernorm.weight",),
        REPLICATED,
        _hidden,
    ),
    Slot(
        r"self_attention\.linear_qkv\.weight",
        tuple(f"{_ATTENTION}{kind}_proj.weight" for kind in "qkv"),
        QKV,
        _qkv,
    ),
    Slot(
        r"self_attention\.linear_qkv\.bias",
        tuple(f"{_ATTENTION}{kind}_proj.bias" for kind in "qkv"),
        QKV,
        _qkv_rows,
        exists=lambda model: model.add_qkv_bias,
    ),
    *(
        Slot(
            rf"self_attention\.{kind}_layernorm\.weight",
            (f"{_ATTENTION}{kind}_norm.weight",),
            REPLICATED,
            _head,
            exists=lambda model: model.qk_layernorm,
        )
        for kind in "qk"
    ),
    Slot(
        r"self_attention\.linear_proj\.weight",
        (f"{_ATTENTION}o_proj.weight",),
        COLUMNS,
        lambda model: ((model.hidden_size, model.num_attention_heads * model.head_dim),),
    ),
    Slot(
        r"pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight",
        ("post_attention_layernorm.weight",),
        REPLICATED,
        _hidden,
    ),
    Slot(
        r"mlp\.linear_fc1\.weight",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        GATED,
        lambda model: ((model.ffn_size, model.hidden_size),) * 2,
        exists=_is_dense,
    ),
    Slot(
        r"mlp\.linear_fc2\.weight",
        ("mlp.down_proj.weight",),
        COLUMNS,
        lambda model: ((model.hidden_size, model.ffn_size),),
        exists=_is_dense,
    ),
    Slot(
        r"mlp\.router\.weight",
        ("mlp.gate.weight",),
        REPLICATED,
        lambda model: ((model.num_moe_experts or 0, model.hidden_size),),
        exists=_has_experts,
    ),
    Slot(
        # One module for each expert, or one for all with numbered weights.
        r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc1\.weight|linear_fc1\.weight(\d+))",
        (f"{_EXPERT}gate_proj.weight", f"{_EXPERT}up_proj.weight"),
        GATED,
        lambda model: ((model.expert_ffn_size, model.hidden_size),) * 2,
        exists=_has_experts,
        of_expert=True,
    ),
    Slot(
        r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc2\.weight|linear_fc2\.weight(\d+))",
        (f"{_EXPERT}down_proj.weight",),
        COLUMNS,
        lambda model: ((model.hidden_size, model.expert_ffn_size),),
        exists=_has_experts,
        of_expert=True,
    ),
)
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def all_weights(model: ModelConfig) -> Iterator[Weight]:
    """Yield every weight of the whole model, in the order of its layers."""
    yield Weight(EMBEDDING)
    for layer in range(model.num_layers):
        for slot in LAYER:
            if not slot.exists(model):
                continue
            if slot.of_expert:
                yield from (Weight(slot, layer, expert) for expert in range(model.num_moe_experts or 0))
            else:
                yield Weight(slot, layer)
    yield Weight(FINAL_NORM)
    if OUTPUT.exists(model):
        yield Weight(OUTPUT)


def find_weight(name: str, layers: Sequence[int], first_expert: int, model: ModelConfig) -> Weight:
    """Return the weight behind a parameter of one rank's stage.

    layers: the numbers, over the whole model, of the stage's layers. first_expert: that of this rank's first expert.
    Raises ValueError for a parameter that the table does not know.
    """
    in_layer = _LAYER_NAME.fullmatch(name)
    own_name = in_layer[2] if in_layer else name
    for slot in LAYER if in_layer else (EMBEDDING, FINAL_NORM, OUTPUT):
        if (match := re.fullmatch(slot.megatron, own_name)) is None:
            continue
        if slot is OUTPUT and model.tie_word_embeddings:
            slot = EMBEDDING  # the last pipeline stage's copy
        numbers = [int(number) for number in match.groups() if number is not None]
        return Weight(
            slot,
            layers[int(in_layer[1])] if in_layer else None,
            first_expert + numbers[0] if numbers else None,
        )
    raise RefusedError(
        f"no Hugging Face tensor is known for Megatron's parameter {name!r}", code="unknown-parameter"
    )
