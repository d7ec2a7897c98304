"""The table of weights: what each is called in Megatron and in Hugging Face models, its shapes, and how ranks cut it.

Megatron's local layers and Transformer Engine's name some of them differently; both are in the table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import prod
from typing import Any, NamedTuple

from nemo_rl_mcore.config.model import MAMBA_TAPS, ModelConfig

Shapes = tuple[tuple[int, ...], ...]


class Packing(Enum):
    """The order of a Hugging Face model's tensors in one parameter of Megatron.

    ALONE: one tensor is the parameter. GATED: the gate's rows, then those of the projection up. QKV: for each query
    group its queries, its key and its value. TRANSPOSED: the parameter's rows are the tensor's columns. INTERLEAVED: as
    GATED, of a tensor whose entries or columns take turns.
    """

    ALONE = auto()
    GATED = auto()
    QKV = auto()
    TRANSPOSED = auto()
    INTERLEAVED = auto()


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
        sections = (shape[self.dimension],)
        if self.sections is not None and ranks > 1:
            sections = self.sections(model)
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
GATED = Layout(0, Packing.GATED)
TRANSPOSED = Layout(0, Packing.TRANSPOSED)
INTERLEAVED = Layout(0, Packing.INTERLEAVED)


SIZES: Mapping[str, Callable[[ModelConfig], int]] = {
    "one": lambda _model: 1,
    "vocabulary": lambda model: model.vocab_size,
    "hidden": lambda model: model.hidden_size,
    "hidden_twice": lambda model: 2 * model.hidden_size,
    "heads": lambda model: model.num_attention_heads,
    "head": lambda model: model.head_dim,
    "queries": lambda model: model.num_attention_heads * model.head_dim,
    "keys": lambda model: model.query_groups * model.head_dim,
    "mlp": lambda model: model.ffn_size,
    "experts": lambda model: model.num_moe_experts or 0,
    "expert": lambda model: model.expert_ffn_size,
    "expert_twice": lambda model: 2 * model.expert_ffn_size,
    "expert_input": lambda model: model.expert_input_size,
    "shared_expert": lambda model: model.moe_shared_expert_intermediate_size or 0,
    # Of latent attention.
    "query_latent": lambda model: model.q_lora_rank or 0,
    "latent": lambda model: model.kv_lora_rank or 0,
    "latent_and_positions": lambda model: (model.kv_lora_rank or 0) + model.qk_pos_emb_head_dim,
    "keys_and_values": lambda model: model.num_attention_heads * (model.qk_head_dim + model.v_head_dim),
    "values": lambda model: model.num_attention_heads * model.v_head_dim,
    # Of Mamba layers.
    "mamba": lambda model: model.mamba_size,
    "mamba_heads": lambda model: model.mamba_num_heads or 0,
    "mamba_convolved": lambda model: sum(mamba_convolved(model)),
    "mamba_projected": lambda model: sum(mamba_projected(model)),
    "mamba_taps": lambda _model: MAMBA_TAPS,
}
"""The sizes of a model, by their names in the tables of weights."""


def mamba_convolved(model: ModelConfig) -> tuple[int, ...]:
    """Return the rows of values, keys and queries."""
    keys = model.mamba_num_groups * model.mamba_state_dim
    return model.mamba_size, keys, keys


def mamba_projected(model: ModelConfig) -> tuple[int, ...]:
    """Return the rows of the gate, of what is convolved, and of the time steps."""
    return model.mamba_size, *mamba_convolved(model), model.mamba_num_heads or 0


type When = Callable[[ModelConfig], bool]
type InLayer = Callable[[ModelConfig, int], bool]


@dataclass(frozen=True)
class Slot:
    """One kind of weight, in a layer (or in an expert of it) or outside of the layers.

    megatron: a regular expression of its names in Megatron; its group, if any, is the number of the expert.
    hugging_face: the tensors it consists of. sizes: of each of them, names of `SIZES` or numbers. exists: whether a
    model has it. in_layer: whether that layer of such a model does. buffer: it has no gradient, and is fp32 whatever
    the number format of the others. prefix: of the names of a layer's tensors. stacked: its tensors, of which `sizes`
    has the part of one expert, hold all experts of a layer, along a first dimension.
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
        prefix = "" if self.layer is None else self.slot.prefix.format(layer=self.layer)
        return tuple(prefix + name.format(expert=self.expert) for name in self.slot.hugging_face)


def _has_experts(model: ModelConfig) -> bool:
    return model.num_moe_experts is not None


def _is_of_experts(model: ModelConfig, layer: int) -> bool:
    return model.num_moe_experts is not None and layer >= model.dense_layers


type Row = tuple[str, str, Layout, str] | tuple[str, str, Layout, str, When]
"""Of a table of weights: names in Megatron, those of the tensors, how ranks cut them, their sizes, and who has them."""


def slots(
    *rows: Row, within: str = "", named: str = "{}", exists: When = lambda _model: True, **more: Any
) -> tuple[Slot, ...]:
    """Return the slots of a table; within: a module in Megatron. named: names of tensors, with the row's in {}."""
    found = list[Slot]()
    for megatron, names, layout, sizes, *own in rows:
        tensors, who = tuple(named.format(name) for name in names.split()), own[0] if own else exists
        found.append(Slot(within + megatron, tensors, layout, tuple(sizes.split(", ")), who, **more))
    return tuple(found)


EMBEDDING, FINAL_NORM, OUTPUT = slots(
    (r"embedding\.word_embeddings\.weight", "model.embed_tokens.weight", ROWS, "vocabulary hidden"),
    (r"decoder\.final_layernorm\.weight", "model.norm.weight", REPLICATED, "hidden"),
    (
        r"output_layer\.weight",
        "lm_head.weight",
        ROWS,
        "vocabulary hidden",
        lambda model: not model.tie_word_embeddings,
    ),
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


def _gated_mlp(
    megatron: str,
    names: Sequence[str],
    rows: str,
    columns: str,
    exists: When,
    in_layer: InLayer,
    *,
    of_expert: bool = False,
) -> tuple[Slot, Slot]:
    """Return a feed-forward layer of these sizes; names: of gate, projection up and projection down.

    `{n}` in Megatron's name is 1 or 2.
    """
    gate, up, down = (f"{name}.weight" for name in names)
    first, second = (megatron.replace("{n}", number) for number in "12")
    of_both, behind = f"{rows} {columns}", (exists, of_expert, in_layer)
    return (
        Slot(first, (gate, up), GATED, (of_both, of_both), *behind),
        Slot(second, (down,), COLUMNS, (f"{columns} {rows}",), *behind),
    )


_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
DENSE_MLP = _gated_mlp(
    r"mlp\.linear_fc{n}\.weight",
    [f"mlp.{part}" for part in _GATE_UP_DOWN],
    "mlp",
    "hidden",
    lambda model: model.has_dense_layers,
    lambda model, layer: not _is_of_experts(model, layer),
)
SHARED_EXPERT = _gated_mlp(
    r"mlp\.shared_experts\.linear_fc{n}\.weight",
    [f"mlp.shared_experts.{part}" for part in _GATE_UP_DOWN],
    "shared_expert",
    "hidden",
    lambda model: _has_experts(model) and bool(model.moe_shared_expert_intermediate_size),
    _is_of_experts,
)
ROUTER_WEIGHT = r"mlp\.router\.weight"
EXPERT_BIAS = r"mlp\.router\.expert_bias"
EXPERT_BIAS_NAME = "e_score_correction_bias"
"""The name of Hugging Face models and engines; either has it in fp32, whatever the others are in."""


def experts(module: str = "mlp", gate_up_down: Sequence[str] = _GATE_UP_DOWN) -> tuple[Slot, ...]:
    """Return the router with its bias and the experts, by what a Hugging Face model calls them."""
    alike: dict[str, Any] = {"named": f"{module}.{{}}", "in_layer": _is_of_experts}
    router = (ROUTER_WEIGHT, "gate.weight", REPLICATED, "experts hidden", _has_experts)
    found = (
        *slots(router, **alike),
        *slots(
            (EXPERT_BIAS, f"gate.{EXPERT_BIAS_NAME}", REPLICATED, "experts"),
            exists=lambda model: _has_experts(model) and model.moe_router_enable_expert_bias,
            buffer=True,
            **alike,
        ),
        *slots(
            (r"mlp\.fc1_latent_proj\.weight", "fc1_latent_proj.weight", REPLICATED, "expert_input hidden"),
            (r"mlp\.fc2_latent_proj\.weight", "fc2_latent_proj.weight", REPLICATED, "hidden expert_input"),
            exists=lambda model: _has_experts(model) and model.moe_latent_size is not None,
            **alike,
        ),
    )
    # One module for each expert, or one for all with numbered weights.
    numbered = r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc{n}\.weight|linear_fc{n}\.weight(\d+))"
    names = [f"{module}.experts.{{expert}}.{part}" for part in gate_up_down]
    of_each = _gated_mlp(
        numbered, names, "expert", "expert_input", _has_experts, _is_of_experts, of_expert=True
    )
    return (*found, *of_each)


LAYER = (*ATTENTION, *DENSE_MLP, *experts(), *SHARED_EXPERT)
"""A layer, of which a model has what exists in it."""
PREDICTION = slots(
    (r"enorm\.weight", "enorm", REPLICATED, "hidden"),
    (r"hnorm\.weight", "hnorm", REPLICATED, "hidden"),
    (r"eh_proj\.weight", "eh_proj", ROWS, "hidden hidden_twice"),
    (r"final_layernorm\.weight", "shared_head.norm", REPLICATED, "hidden"),
    named="{}.weight",
    exists=lambda model: bool(model.mtp_num_layers),
)
"""Weights of a multi-token prediction layer that other layers do not have."""
