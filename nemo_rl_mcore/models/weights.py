"""The table of weights: what each is called in Megatron and in Hugging Face models, its shapes, and how ranks cut it.

Megatron's local layers and Transformer Engine's name some of them differently; both are in the table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import prod
from typing import NamedTuple

from nemo_rl_mcore.config.model import ModelConfig

Shapes = tuple[tuple[int, ...], ...]


class Packing(Enum):
    """The order of a Hugging Face model's tensors in one parameter of Megatron."""

    ALONE = auto()
    """One tensor is the parameter."""
    GATED = auto()
    """The gate's rows, then those of the projection up."""
    QKV = auto()
    """For each query group its queries, its key and its value."""
    TRANSPOSED = auto()
    """The parameter's rows are the tensor's columns."""
    INTERLEAVED = auto()
    """The gate's rows, then those of the projection up, of a tensor whose entries or columns take turns."""


@dataclass(frozen=True)
class Layout:
    """`dimension` is the one that tensor-parallel ranks cut, None where each rank holds the whole.

    sections: the parts of a tensor along it, of each of which a rank has its share; None for one.
    """

    dimension: int | None
    packing: Packing = Packing.ALONE
    sections: Callable[[ModelConfig], tuple[int, ...]] | None = None

    def cuts(
        self, shape: Sequence[int], rank: int, ranks: int, model: ModelConfig
    ) -> list[tuple[slice, ...]]:
        """Return the parts of a tensor of that shape that a rank holds, one after the other along the dimension.

        Of an uneven tensor without sections the last ranks hold less.
        """
        whole = [slice(0, length) for length in shape]
        if self.dimension is None:
            return [tuple(whole)]
        size = shape[self.dimension]
        sections = (size,) if self.sections is None or ranks == 1 else self.sections(model)
        parts: list[tuple[slice, ...]] = []
        first = 0
        for length in sections:
            share, end = -(-length // ranks), first + length
            whole[self.dimension] = slice(
                min(first + rank * share, end), min(first + (rank + 1) * share, end)
            )
            parts.append(tuple(whole))
            first = end
        return parts


REPLICATED = Layout(None)
ROWS = Layout(0)
COLUMNS = Layout(1)
QKV = Layout(0, Packing.QKV)
GATED = Layout(0, Packing.GATED)
TRANSPOSED = Layout(0, Packing.TRANSPOSED)
INTERLEAVED = Layout(0, Packing.INTERLEAVED)


@dataclass(frozen=True)
class Slot:
    """One kind of weight, in a layer (or in an expert of it) or outside of the layers.

    megatron: a regular expression of its names in Megatron; its group, if any, is the number of the expert.
    hugging_face: the tensors it consists of. exists: whether a model has it. in_layer: whether that layer of a model
    that has it does. buffer: it has no gradient, and is fp32 whatever the number format of the others. prefix: what
    stands before the names of the tensors of a layer. stacked: its tensors, of which `shapes` has the part of one
    expert, hold all experts of a layer, along a dimension before the others.
    """

    megatron: str
    hugging_face: tuple[str, ...]
    layout: Layout
    shapes: Callable[[ModelConfig], Shapes]
    exists: Callable[[ModelConfig], bool] = lambda _: True
    of_expert: bool = False
    in_layer: Callable[[ModelConfig, int], bool] = lambda _model, _layer: True
    buffer: bool = False
    prefix: str = "model.layers.{layer}."
    stacked: bool = False

    def tensor_shapes(self, model: ModelConfig) -> Shapes:
        """Return the shapes of its tensors, as files and engines have them."""
        experts = (model.num_moe_experts or 0,) if self.stacked else ()
        return tuple((*experts, *shape) for shape in self.shapes(model))

    def count(self, model: ModelConfig) -> int:
        """Return the numbers that a layer holds of it, in all experts where it is theirs."""
        of_one = sum(prod(shape) for shape in self.shapes(model))
        return of_one * (model.num_moe_experts or 0) if self.of_expert else of_one


@dataclass(frozen=True)
class Weight:
    """A weight of the whole model: its slot, and the layer and expert counted over all ranks."""

    slot: Slot
    layer: int | None = None
    expert: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return what its tensors are called in a Hugging Face model."""
        prefix = "" if self.layer is None else self.slot.prefix.format(layer=self.layer)
        return tuple(prefix + name.format(expert=self.expert) for name in self.slot.hugging_face)


def _has_experts(model: ModelConfig) -> bool:
    return model.num_moe_experts is not None


def _is_of_experts(model: ModelConfig, layer: int) -> bool:
    return _has_experts(model) and layer >= model.dense_layers


def _vocabulary(model: ModelConfig) -> Shapes:
    return ((model.vocab_size, model.hidden_size),)


def _hidden(model: ModelConfig) -> Shapes:
    return ((model.hidden_size,),)


def _qkv_rows(model: ModelConfig) -> Shapes:
    queries, keys = model.num_attention_heads * model.head_dim, model.query_groups * model.head_dim
    return ((queries,), (keys,), (keys,))


EMBEDDING = Slot(r"embedding\.word_embeddings\.weight", ("model.embed_tokens.weight",), ROWS, _vocabulary)
OUTPUT = Slot(
    r"output_layer\.weight",
    ("lm_head.weight",),
    ROWS,
    _vocabulary,
    exists=lambda model: not model.tie_word_embeddings,
)
FINAL_NORM = Slot(r"decoder\.final_layernorm\.weight", ("model.norm.weight",), REPLICATED, _hidden)


class Outside(NamedTuple):
    """The weights outside of layers."""

    embedding: Slot = EMBEDDING
    final_norm: Slot = FINAL_NORM
    output: Slot = OUTPUT

    def of(self, model: ModelConfig) -> list[Slot]:
        """Return those that a model has."""
        return [slot for slot in self if slot.exists(model)]


OUTSIDE = Outside()

INPUT_NORM = Slot(
    r"input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight",
    ("input_layernorm.weight",),
    REPLICATED,
    _hidden,
)
POST_ATTENTION_NORM = Slot(
    r"pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight",
    ("post_attention_layernorm.weight",),
    REPLICATED,
    _hidden,
)
ATTENTION = (
    INPUT_NORM,
    Slot(
        r"self_attention\.linear_qkv\.weight",
        tuple(f"self_attn.{kind}_proj.weight" for kind in "qkv"),
        QKV,
        lambda model: tuple((*rows, model.hidden_size) for rows in _qkv_rows(model)),
    ),
    Slot(
        r"self_attention\.linear_qkv\.bias",
        tuple(f"self_attn.{kind}_proj.bias" for kind in "qkv"),
        QKV,
        _qkv_rows,
        exists=lambda model: model.add_qkv_bias or model.add_bias_linear,
    ),
    *(
        Slot(
            rf"self_attention\.{kind}_layernorm\.weight",
            (f"self_attn.{kind}_norm.weight",),
            REPLICATED,
            lambda model: ((model.head_dim,),),
            exists=lambda model: model.qk_layernorm,
        )
        for kind in "qk"
    ),
    Slot(
        r"self_attention\.linear_proj\.weight",
        ("self_attn.o_proj.weight",),
        COLUMNS,
        lambda model: ((model.hidden_size, model.num_attention_heads * model.head_dim),),
    ),
    Slot(
        r"self_attention\.linear_proj\.bias",
        ("self_attn.o_proj.bias",),
        REPLICATED,
        _hidden,
        exists=lambda model: model.add_bias_linear,
    ),
    Slot(
        r"self_attention\.core_attention\.softmax_offset",
        ("self_attn.sinks",),
        ROWS,
        lambda model: ((model.num_attention_heads,),),
        exists=lambda model: model.softmax_type == "learnable",
    ),
    POST_ATTENTION_NORM,
)


def _gated_mlp(
    megatron: str,
    hugging_face: str,
    width: Callable[[ModelConfig], int],
    exists: Callable[[ModelConfig], bool],
    in_layer: Callable[[ModelConfig, int], bool],
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Slot, Slot]:
    """Return a feed-forward layer of that width; `{n}` in Megatron's name is 1 or 2, and experts are numbered."""
    gate, up, down = (f"{hugging_face}{part}.weight" for part in gate_up_down)
    of_expert = "(" in megatron

    def rows_and_columns(model: ModelConfig) -> tuple[int, int]:
        return width(model), model.expert_input_size if of_expert else model.hidden_size

    first = Slot(
        megatron.replace("{n}", "1"),
        (gate, up),
        GATED,
        lambda model: (rows_and_columns(model),) * 2,
        exists,
        of_expert,
        in_layer,
    )
    second = Slot(
        megatron.replace("{n}", "2"),
        (down,),
        COLUMNS,
        lambda model: (rows_and_columns(model)[::-1],),
        exists,
        of_expert,
        in_layer,
    )
    return first, second


DENSE_MLP = _gated_mlp(
    r"mlp\.linear_fc{n}\.weight",
    "mlp.",
    lambda model: model.ffn_size,
    lambda model: model.has_dense_layers,
    lambda model, layer: not _is_of_experts(model, layer),
)
SHARED_EXPERT = _gated_mlp(
    r"mlp\.shared_experts\.linear_fc{n}\.weight",
    "mlp.shared_experts.",
    lambda model: model.moe_shared_expert_intermediate_size or 0,
    lambda model: _has_experts(model) and bool(model.moe_shared_expert_intermediate_size),
    _is_of_experts,
)
ROUTER_WEIGHT = r"mlp\.router\.weight"
EXPERT_BIAS = r"mlp\.router\.expert_bias"
EXPERT_BIAS_NAME = "e_score_correction_bias"
"""What Hugging Face models and engines call it; either has it in fp32, whatever the others are in."""


def experts(
    module: str = "mlp", gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Slot, ...]:
    """Return the router with its bias and the experts, by what a Hugging Face model calls them."""
    latents: dict[str, Callable[[ModelConfig], Shapes]] = {
        "fc1_latent_proj": lambda model: ((model.expert_input_size, model.hidden_size),),
        "fc2_latent_proj": lambda model: ((model.hidden_size, model.expert_input_size),),
    }
    return (
        Slot(
            ROUTER_WEIGHT,
            (f"{module}.gate.weight",),
            REPLICATED,
            lambda model: ((model.num_moe_experts or 0, model.hidden_size),),
            _has_experts,
            in_layer=_is_of_experts,
        ),
        Slot(
            EXPERT_BIAS,
            (f"{module}.gate.{EXPERT_BIAS_NAME}",),
            REPLICATED,
            lambda model: ((model.num_moe_experts or 0,),),
            lambda model: _has_experts(model) and model.moe_router_enable_expert_bias,
            in_layer=_is_of_experts,
            buffer=True,
        ),
        *(
            Slot(
                rf"mlp\.{name}\.weight",
                (f"{module}.{name}.weight",),
                REPLICATED,
                shapes,
                lambda model: _has_experts(model) and model.moe_latent_size is not None,
                in_layer=_is_of_experts,
            )
            for name, shapes in latents.items()
        ),
        # One module for each expert, or one for all with numbered weights.
        *_gated_mlp(
            r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc{n}\.weight|linear_fc{n}\.weight(\d+))",
            f"{module}.experts.{{expert}}.",
            lambda model: model.expert_ffn_size,
            _has_experts,
            _is_of_experts,
            gate_up_down,
        ),
    )


LAYER = (*ATTENTION, *DENSE_MLP, *experts(), *SHARED_EXPERT)
"""A layer, of which a model has what exists in it."""

_OF_PREDICTION: tuple[tuple[str, str, Layout, Callable[[ModelConfig], Shapes]], ...] = (
    ("enorm", "enorm", REPLICATED, _hidden),
    ("hnorm", "hnorm", REPLICATED, _hidden),
    ("eh_proj", "eh_proj", ROWS, lambda model: ((model.hidden_size, 2 * model.hidden_size),)),
    ("final_layernorm", "shared_head.norm", REPLICATED, _hidden),
)
PREDICTION = tuple(
    Slot(
        rf"{megatron}\.weight", (f"{name}.weight",), layout, shapes, lambda model: bool(model.mtp_num_layers)
    )
    for megatron, name, layout, shapes in _OF_PREDICTION
)
"""Weights of a multi-token prediction layer that other layers do not have."""
