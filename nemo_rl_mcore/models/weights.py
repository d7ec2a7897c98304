"""The table of weights: names in Megatron and in Hugging Face models, shapes, and split between ranks.

Some names differ between Megatron's local layers and Transformer Engine's; the table has both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import prod
from typing import Any, NamedTuple

from nemo_rl_mcore.config.model import MAMBA_TAPS, ModelConfig

Shapes = tuple[tuple[int, ...], ...]


class Packing(Enum):
    """Arrangement of a Hugging Face model's tensors in one Megatron parameter.

    ALONE: one tensor is the parameter. JOINED: the tensors' rows, one tensor after the other. QKV: for each query
    group, its queries, their gates if attention has an output gate, key and value. TRANSPOSED: the parameter's rows are
    the tensor's columns. INTERLEAVED: as JOINED, from a tensor with alternating gate and up columns (or entries).
    """

    ALONE = auto()
    JOINED = auto()
    QKV = auto()
    TRANSPOSED = auto()
    INTERLEAVED = auto()


@dataclass(frozen=True)
class Layout:
    """Split of a weight between tensor-parallel ranks along `dimension`; None if each rank has the whole weight.

    sections: for each tensor, sizes of parts along the dimension, each split separately; None for a single part.
    """

    dimension: int | None
    packing: Packing = Packing.ALONE
    sections: Callable[[ModelConfig], Sequence[Sequence[int]]] | None = None

    def cuts(
        self, shape: Sequence[int], rank: int, ranks: int, model: ModelConfig, number: int = 0
    ) -> list[tuple[slice, ...]]:
        """Return a rank's parts of a weight's tensor with this number and shape, in order along the dimension.

        If a tensor without sections does not divide evenly, the last ranks hold less.
        """
        whole = [slice(0, length) for length in shape]
        if self.dimension is None:
            return [tuple(whole)]
        sections: Sequence[int] = (shape[self.dimension],)
        if self.sections is not None and ranks > 1:
            sections = self.sections(model)[number]
        parts, end = list[tuple[slice, ...]](), 0
        for length in sections:
            first, share, end = end, -(-length // ranks), end + length
            bounds = (min(first + place * share, end) for place in (rank, rank + 1))
            whole[self.dimension] = slice(*bounds)
            parts.append(tuple(whole))
        return parts


REPLICATED = Layout(None)
ROWS = Layout(0)
COLUMNS = Layout(1)
QKV = Layout(0, Packing.QKV)
GATED = Layout(0, Packing.JOINED)
TRANSPOSED = Layout(0, Packing.TRANSPOSED)
INTERLEAVED = Layout(0, Packing.INTERLEAVED)


SIZES: Mapping[str, Callable[[ModelConfig], int]] = {
    "one": lambda _model: 1,
    "vocabulary": lambda model: model.vocab_size,
    "hidden": lambda model: model.hidden_size,
    "hidden_twice": lambda model: 2 * model.hidden_size,
    "heads": lambda model: model.num_attention_heads,
    "head": lambda model: model.shape.head_dim,
    "queries": lambda model: model.num_attention_heads * model.shape.head_dim,
    "keys": lambda model: model.shape.query_groups * model.shape.head_dim,
    "mlp": lambda model: model.shape.ffn_size,
    "experts": lambda model: model.num_moe_experts or 0,
    "expert": lambda model: model.shape.expert_ffn_size,
    "expert_twice": lambda model: 2 * model.shape.expert_ffn_size,
    "expert_input": lambda model: model.moe_latent_size or model.hidden_size,
    "shared_expert": lambda model: model.moe_shared_expert_intermediate_size or 0,
    # Latent attention.
    "query_latent": lambda model: model.q_lora_rank or 0,
    "latent": lambda model: model.kv_lora_rank or 0,
    "latent_and_positions": lambda model: (model.kv_lora_rank or 0) + model.qk_pos_emb_head_dim,
    "keys_and_values": lambda model: model.num_attention_heads * (model.qk_head_dim + model.v_head_dim),
    "values": lambda model: model.num_attention_heads * model.v_head_dim,
    # Mamba layers.
    "mamba": lambda model: model.shape.mamba_size,
    "mamba_heads": lambda model: model.mamba_num_heads or 0,
    "mamba_convolved": lambda model: sum(mamba_convolved(model)[0]),
    "mamba_projected": lambda model: sum(mamba_projected(model)[0]),
    "mamba_taps": lambda _model: MAMBA_TAPS,
    # Gated delta nets.
    "queries_and_gates": lambda model: 2 * model.num_attention_heads * model.shape.head_dim,
    "linear_heads": lambda model: model.linear_num_value_heads,
    "linear_head": lambda model: model.linear_value_head_dim,
    "linear_values": lambda model: model.linear_num_value_heads * model.linear_value_head_dim,
    "linear_convolved": lambda model: sum(linear_convolved(model)[0]),
}
"""A model's sizes by their names in the tables of weights."""


def mamba_convolved(model: ModelConfig) -> Sequence[Sequence[int]]:
    """Return the number of convolved rows for values, keys and queries."""
    keys = model.mamba_num_groups * model.mamba_state_dim
    return ((model.shape.mamba_size, keys, keys),)


def mamba_projected(model: ModelConfig) -> Sequence[Sequence[int]]:
    """Return the number of rows for the gate, the convolved parts and the time steps."""
    return ((model.shape.mamba_size, *mamba_convolved(model)[0], model.mamba_num_heads or 0),)


def linear_convolved(model: ModelConfig) -> Sequence[Sequence[int]]:
    """Return the number of convolved rows for a gated delta net's queries, keys and values."""
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    return ((keys, keys, model.linear_num_value_heads * model.linear_value_head_dim),)


def linear_projected(model: ModelConfig) -> Sequence[Sequence[int]]:
    """Return the numbers of rows for the convolved parts, the gate, the updates' strengths and the decays."""
    (convolved,), heads = linear_convolved(model), model.linear_num_value_heads
    return convolved, (convolved[-1],), (heads,), (heads,)


type Stored = Callable[[str, Callable[[], tuple[int, ...]]], Mapping[str, tuple[int | None, slice]]]
"""From the name of a file's tensor, and a function for its shape, to the names of the tensors in it, each with its
index in the first dimension and its rows; None if it is the whole tensor."""
type When = Callable[[ModelConfig], bool]
type InLayer = Callable[[ModelConfig, int], bool]


@dataclass(frozen=True)
class Slot:
    """One kind of weight: in each layer, in each expert of a layer, or outside the layers.

    megatron: regular expression for its names in Megatron, with the expert's number as the group, if any.
    hugging_face: names of its tensors. sizes: each tensor's dimensions, as names in `SIZES` or numbers. exists: returns
    True for a model with this weight. in_layer: returns True for a layer with it. buffer: true if it has no gradient,
    and is always fp32. prefix: prefix of the tensor names in a layer. stacked: true if its tensors contain all experts
    of a layer along an additional first dimension, which `sizes` omits.
    """

    megatron: str
    hugging_face: tuple[str, ...]
    layout: Layout
    sizes: tuple[str, ...]
    exists: When = lambda _model: True
    of_expert: bool = False
    in_layer: InLayer = lambda _model, _layer: True
    buffer: bool = False
    prefix: str = "model.layers.{layer}."
    stacked: bool = False

    def shapes(self, model: ModelConfig) -> Shapes:
        return tuple(
            tuple(int(name) if name.isdigit() else SIZES[name](model) for name in sizes.split())
            for sizes in self.sizes
        )

    def tensor_shapes(self, model: ModelConfig) -> Shapes:
        experts = (model.num_moe_experts or 0,) if self.stacked else ()
        return tuple((*experts, *shape) for shape in self.shapes(model))

    def count(self, model: ModelConfig) -> int:
        """Return its number of parameters in a layer, over all experts if it belongs to experts."""
        of_one = sum(prod(shape) for shape in self.shapes(model))
        return of_one * (model.num_moe_experts or 0) if self.of_expert else of_one


@dataclass(frozen=True)
class Weight:
    """A weight of the whole model: its slot, and its layer and expert numbered over all ranks."""

    slot: Slot
    layer: int | None = None
    expert: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        prefix = "" if self.layer is None else self.slot.prefix.format(layer=self.layer)
        return tuple(prefix + name.format(expert=self.expert) for name in self.slot.hugging_face)


def _has_experts(model: ModelConfig) -> bool:
    return model.num_moe_experts is not None


def _is_of_experts(model: ModelConfig, layer: int) -> bool:
    return model.num_moe_experts is not None and layer >= model.shape.dense_layers


def slots(
    *rows: tuple[str, str, Layout, str] | tuple[str, str, Layout, str, When],
    within: str = "",
    named: str = "{}",
    exists: When = lambda _model: True,
    **more: Any,
) -> tuple[Slot, ...]:
    """Return slots from rows of Megatron name, tensor names, layout, sizes and, optionally, condition.

    within: Megatron module prefix. named: format of tensor names, with {} for the row's name.
    """
    found = list[Slot]()
    for megatron, names, layout, sizes, *own in rows:
        tensors, who = tuple(named.format(name) for name in names.split()), own[0] if own else exists
        found.append(Slot(within + megatron, tensors, layout, tuple(sizes.split(", ")), who, **more))
    return tuple(found)


_IS_UNTIED: When = lambda model: not model.tie_word_embeddings  # noqa: E731
EMBEDDING, FINAL_NORM, OUTPUT = slots(
    (r"embedding\.word_embeddings\.weight", "model.embed_tokens.weight", ROWS, "vocabulary hidden"),
    (r"decoder\.final_layernorm\.weight", "model.norm.weight", REPLICATED, "hidden"),
    (r"output_layer\.weight", "lm_head.weight", ROWS, "vocabulary hidden", _IS_UNTIED),
)


class Outside(NamedTuple):
    embedding: Slot = EMBEDDING
    final_norm: Slot = FINAL_NORM
    output: Slot = OUTPUT

    def of(self, model: ModelConfig) -> list[Slot]:
        return [slot for slot in self if slot.exists(model)]


OUTSIDE = Outside()

_QKV_NORM, _FC1_NORM = r"self_attention\.linear_qkv\.layer_norm_weight", r"mlp\.linear_fc1\.layer_norm_weight"
_QKV_BIAS: When = lambda model: model.add_qkv_bias or model.add_bias_linear  # noqa: E731
_SINKS: When = lambda model: model.softmax_type == "learnable"  # noqa: E731
_QKV = "q_proj.{0} k_proj.{0} v_proj.{0}"
INPUT_NORM, POST_ATTENTION_NORM = slots(
    (rf"input_layernorm\.weight|{_QKV_NORM}", "input_layernorm.weight", REPLICATED, "hidden"),
    (rf"pre_mlp_layernorm\.weight|{_FC1_NORM}", "post_attention_layernorm.weight", REPLICATED, "hidden"),
)
ATTENTION = (
    INPUT_NORM,
    *slots(
        (r"linear_qkv\.weight", _QKV.format("weight"), QKV, "queries hidden, keys hidden, keys hidden"),
        (r"linear_qkv\.bias", _QKV.format("bias"), QKV, "queries, keys, keys", _QKV_BIAS),
        (r"q_layernorm\.weight", "q_norm.weight", REPLICATED, "head", lambda model: model.qk_layernorm),
        (r"k_layernorm\.weight", "k_norm.weight", REPLICATED, "head", lambda model: model.qk_layernorm),
        (r"linear_proj\.weight", "o_proj.weight", COLUMNS, "hidden queries"),
        (r"linear_proj\.bias", "o_proj.bias", REPLICATED, "hidden", lambda model: model.add_bias_linear),
        (r"core_attention\.softmax_offset", "sinks", ROWS, "heads", _SINKS),
        within=r"self_attention\.",
        named="self_attn.{}",
    ),
    POST_ATTENTION_NORM,
)


_IS_DENSE: InLayer = lambda model, layer: not _is_of_experts(model, layer)  # noqa: E731
DENSE_MLP = slots(
    (r"mlp\.linear_fc1\.weight", "gate_proj.weight up_proj.weight", GATED, "mlp hidden, mlp hidden"),
    (r"mlp\.linear_fc2\.weight", "down_proj.weight", COLUMNS, "hidden mlp"),
    named="mlp.{}",
    exists=lambda model: model.shape.has_dense_layers,
    in_layer=_IS_DENSE,
)
_SHARED = "shared_expert hidden, shared_expert hidden"
SHARED_EXPERT = slots(
    (r"mlp\.shared_experts\.linear_fc1\.weight", "gate_proj.weight up_proj.weight", GATED, _SHARED),
    (r"mlp\.shared_experts\.linear_fc2\.weight", "down_proj.weight", COLUMNS, "hidden shared_expert"),
    named="mlp.shared_experts.{}",
    exists=lambda model: _has_experts(model) and bool(model.moe_shared_expert_intermediate_size),
    in_layer=_is_of_experts,
)
ROUTER_WEIGHT = r"mlp\.router\.weight"
EXPERT_BIAS = r"mlp\.router\.expert_bias"
EXPERT_BIAS_NAME = "e_score_correction_bias"
"""Name in Hugging Face models and engines, both of which keep it in fp32 whatever the other weights' format."""


def experts(
    module: str = "mlp", gate_up_down: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Slot, ...]:
    """Return the slots of router, router bias and experts for a Hugging Face model's names."""
    table: dict[str, Any] = {"named": f"{module}.{{}}", "in_layer": _is_of_experts}
    gate, up, down = (f"experts.{{expert}}.{part}.weight" for part in gate_up_down)
    # Either a module per expert, or one module with numbered weights.
    first, second = (
        rf"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc{number}\.weight|linear_fc{number}\.weight(\d+))"
        for number in (1, 2)
    )
    of_both = "expert expert_input, expert expert_input"
    return (
        *slots((ROUTER_WEIGHT, "gate.weight", REPLICATED, "experts hidden"), exists=_has_experts, **table),
        *slots(
            (EXPERT_BIAS, f"gate.{EXPERT_BIAS_NAME}", REPLICATED, "experts"),
            exists=lambda model: _has_experts(model) and model.moe_router_enable_expert_bias,
            buffer=True,
            **table,
        ),
        *slots(
            (r"mlp\.fc1_latent_proj\.weight", "fc1_latent_proj.weight", REPLICATED, "expert_input hidden"),
            (r"mlp\.fc2_latent_proj\.weight", "fc2_latent_proj.weight", REPLICATED, "hidden expert_input"),
            exists=lambda model: _has_experts(model) and model.moe_latent_size is not None,
            **table,
        ),
        *slots(
            (first, f"{gate} {up}", GATED, of_both),
            (second, down, COLUMNS, "expert_input expert"),
            exists=_has_experts,
            of_expert=True,
            **table,
        ),
    )


LAYER = (*ATTENTION, *DENSE_MLP, *experts(), *SHARED_EXPERT)
"""All weights of a layer; a model has those that exist in it."""
PREDICTION = slots(
    (r"enorm\.weight", "enorm", REPLICATED, "hidden"),
    (r"hnorm\.weight", "hnorm", REPLICATED, "hidden"),
    (r"eh_proj\.weight", "eh_proj", ROWS, "hidden hidden_twice"),
    (r"final_layernorm\.weight", "shared_head.norm", REPLICATED, "hidden"),
    named="{}.weight",
    exists=lambda model: bool(model.mtp_num_layers),
)
"""Weights that only multi-token prediction layers have."""
