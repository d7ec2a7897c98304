"""Configuration of the architecture, for random weights and as a check on loaded weights."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from nemo_rl_mcore.config.base import (
    Counted,
    Float,
    IntTuple,
    NonNegativeFloat,
    PositiveFloat,
    Rule,
    Size,
    StrictModel,
    either,
)
from nemo_rl_mcore.errors import quoted

_OF_YARN = ("mscale", "mscale_all_dim", "truncate")
ROPE_TURNS: Mapping[str, Mapping[str, float]] = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_slow": 1.0, "beta_fast": 32.0},
}
"""Turns within the original context below which rotations scale fully, and above which not at all; config.json keys."""


class RopeScalingConfig(StrictModel):
    """Scaling of rotary frequencies for long contexts."""

    rope_type: Literal["llama3", "yarn"] = "llama3"
    """Scaling method: llama3 (Llama 3.1 and later), or yarn, which also sharpens attention. The limits between slow and
    fast rotations are those of all published models: 1 and 4 turns for llama3, 1 and 32 for yarn."""
    factor: Annotated[Float, Field(gt=0, le=1e6)]
    """Divisor of the slowest rotations' frequencies."""
    mscale: NonNegativeFloat = 1.0
    """yarn with kv_lora_rank: strength of the scaling of the rotated parts of queries and keys by factor."""
    mscale_all_dim: NonNegativeFloat = 0.0
    """yarn with kv_lora_rank: strength of the scaling of whole queries and keys by factor."""
    truncate: bool = True
    """yarn: round the range of channel pairs between slow and fast rotations outwards (false in gpt-oss)."""
    original_max_position_embeddings: Size
    """Maximum sequence length before scaling."""

    read_unless = tuple((key, "rope_type", "llama3") for key in _OF_YARN)

    @property
    def written(self) -> dict[str, object]:
        """Return the scaling's entries for config.json, except its type; those that change nothing are left out."""
        written: dict[str, object] = {"factor": self.factor, **ROPE_TURNS[self.rope_type]}
        if (self.mscale, self.mscale_all_dim) != (1.0, 0.0):
            written |= {"mscale": self.mscale, "mscale_all_dim": self.mscale_all_dim}
        if not self.truncate:
            written["truncate"] = False
        written["original_max_position_embeddings"] = self.original_max_position_embeddings
        return written

    rules = (
        Rule(
            "too-small",
            "factor",
            lambda own: own.rope_type == "yarn" and own.factor < 1,
            fix="set it to 1 or more",
        ),
        Rule(
            "not-supported",
            "mscale",
            lambda own: (
                own.rope_type == "yarn"
                and "mscale" in own.written
                and not (own.mscale and own.mscale_all_dim)
            ),
            ("mscale_all_dim",),
            "set both, or neither",
            "other libraries interpret that differently",
        ),
    )


MAMBA_TAPS = 4
"""Kernel size of the convolution of a Mamba layer or a gated delta net, in tokens."""
MAMBA_NORM_EPSILON = 1e-5
"""Epsilon of the norm after a Mamba layer's scan, independent of layernorm_epsilon."""


_WITH_LATENT_ATTENTION: Mapping[str, object] = {
    "num_query_groups": None,
    "kv_channels": None,
    "add_qkv_bias": False,
    "qk_layernorm": True,
    "mtp_num_layers": None,
    "softmax_type": "vanilla",
    "sliding_window": None,
}
"""Values required with latent attention: its heads have separate sizes, and its latents are normalised."""

_WITH_LINEAR_ATTENTION: Mapping[str, object] = {
    "qk_layernorm": True,
    "add_qkv_bias": False,
    "add_bias_linear": False,
    "activation_func": "silu",
    "rope_scaling": None,
    "kv_lora_rank": None,
    "hybrid_layer_pattern": None,
    "moe_layer_freq": None,
    "mtp_num_layers": None,
    "softmax_type": "vanilla",
    "sliding_window": None,
}
"""Values required with gated delta nets."""
ROTATED_SHARE = 0.25
"""Share of each head that is rotated in attention beside gated delta nets."""

_PATTERN = "hybrid_layer_pattern"

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
_KINDS = (MAMBA, ATTENTION, MLP, EXPERTS)
"""Layer types of a hybrid model, as characters."""


def _expert_rules(model: "ModelConfig") -> "Iterator[Rule[ModelConfig]]":
    """Yield rules for biases and activations of experts, for groups of experts, and for layers without experts."""
    experts, groups, chosen = model.num_moe_experts, model.moe_router_num_groups, model.moe_router_group_topk
    only_attention_and_experts = (
        experts is not None
        and (model.hybrid_layer_pattern, model.kv_lora_rank) == (None, None)
        and not model.shape.dense_layers
        and not model.moe_shared_expert_intermediate_size
        and not model.mtp_num_layers
    )
    for key, value in (("add_bias_linear", True), ("activation_func", "quick_gelu")):
        wrong = getattr(model, key) == value and not only_attention_and_experts
        related = ("num_moe_experts", "moe_layer_freq", "moe_shared_expert_intermediate_size")
        why = "it needs a model in which every layer has attention and experts, without shared experts"
        yield Rule("requires", key, wrong, related, "remove it, or set num_moe_experts", why)
    if experts is None:
        return
    given, missing = ("moe_router_num_groups", "moe_router_group_topk")[:: 1 if groups else -1]
    if (groups is None) != (chosen is None):
        yield Rule("requires", given, True, (missing,), f"set {missing}")
    elif groups and experts % groups:
        yield Rule("not-divisible", "num_moe_experts", True, (given,), "make it a multiple")
    elif groups and chosen and chosen > groups:
        yield Rule("too-large", "moe_router_group_topk", True, (given,), f"set it to {groups} at most")
    elif groups and chosen and not chosen <= model.moe_router_topk <= chosen * (experts // groups):
        fix = f"set it to {chosen} at least and {chosen * (experts // groups)} at most"
        yield Rule(
            "not-allowed", "moe_router_topk", True, ("moe_router_group_topk", "moe_router_num_groups"), fix
        )
    if (layers := model.moe_layer_freq) is None:
        return
    dense = layers.count(0)
    if layers != (0,) * dense + (1,) * (model.num_layers - dense):
        fix = "give dense layers (0), then layers with experts (1), or set it to null"
        yield Rule("not-supported", "moe_layer_freq", True, ("num_layers",), fix)
    elif 1 not in layers:
        fix, why = "set num_moe_experts: null", "no layer has experts"
        yield Rule("contradicts", "moe_layer_freq", True, ("num_moe_experts",), fix, why)


@dataclass(frozen=True)
class ModelShape:
    """Sizes and layers that follow from a model's keys.

    longest_sequence: number of positions that the rotations support, which YaRN may raise above the weights' own.
    query_groups: number of key and value heads. head_dim: size of each head's query and key. dense_layers: number of
    layers without experts, which come first. has_dense_layers: true if any layer has a dense feed-forward part besides
    shared experts. mamba_size: channels of all heads of a Mamba layer.
    """

    longest_sequence: int
    query_groups: int
    head_dim: int
    ffn_size: int
    expert_ffn_size: int
    gated: bool
    dense_layers: int
    has_dense_layers: bool
    has_mamba: bool
    mamba_size: int


class LatentHeadsConfig(StrictModel):
    """Latent attention, whose heads read latents instead of the hidden state, as in DeepSeek's models."""

    q_lora_rank: Size | None = None
    """Width of the query latent; null projects queries from the hidden state."""
    kv_lora_rank: Size | None = None
    """Width of the key-value latent (DeepSeek); null projects keys and values directly from the hidden state."""
    qk_head_dim: Size = 128
    """Size of the unrotated part of each head's query and key."""
    qk_pos_emb_head_dim: Size = 64
    """Size of the rotated part of each head's query and key; all heads share the key's part."""
    v_head_dim: Size = 128
    """Size of each head's value."""


class MambaLayersConfig(StrictModel):
    """Sizes of a hybrid model's Mamba-2 layers; null in models without such layers."""

    mamba_num_heads: Size | None = None
    """Number of heads in a Mamba layer."""
    mamba_head_dim: Size = 64
    """Size of each head in a Mamba layer."""
    mamba_state_dim: Size = 128
    """State size per channel of a head."""
    mamba_num_groups: Size = 8
    """Number of head groups; the heads of a group share the weights that read and write their states."""


class LinearAttentionConfig(StrictModel):
    """Linear attention by gated delta nets, as in Qwen3.5; each net has a state per value head."""

    linear_attention_freq: Annotated[Counted, Field(ge=2)] | None = None
    """Full attention in every layer with a multiple of this number, gated delta nets in the others; null means full
    attention in all layers. As in Qwen3.5, attention then has an output gate and rotates a quarter of each head, the
    shared expert has a gate, and norms multiply by 1 plus their weight."""
    linear_num_key_heads: Size = 16
    """Number of query and key heads in a gated delta net."""
    linear_num_value_heads: Size = 32
    """Number of value heads in a gated delta net."""
    linear_key_head_dim: Size = 128
    """Size of each query and key in a gated delta net."""
    linear_value_head_dim: Size = 128
    """Size of each value in a gated delta net."""


class ExpertsConfig(StrictModel):
    """Mixture of experts: each token passes through a few of a layer's feed-forward experts."""

    num_moe_experts: Counted | None = None
    """Number of experts in each MoE layer; null means a dense model."""
    moe_layer_freq: IntTuple | None = None
    """One entry per layer: 0 for a dense layer, then 1 for an MoE layer; null means that all are MoE layers."""
    moe_router_topk: Size = 2
    """Number of experts per token."""
    moe_ffn_hidden_size: Size | None = None
    """Width of each expert; null means ffn_hidden_size."""
    moe_latent_size: Size | None = None
    """Width of the latent vector between the hidden state and the experts; null means none."""
    moe_shared_expert_intermediate_size: Size | None = None
    """Width of the shared expert, which processes every token; null means no shared expert."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns the router's logits into scores."""
    moe_router_pre_softmax: bool = False
    """Take the softmax over all experts before the selection, instead of over the selected experts."""
    moe_router_num_groups: Size | None = None
    """Number of equal expert groups; a token selects groups first, then experts within them. Null means no groups."""
    moe_router_group_topk: Size | None = None
    """Number of groups selected per token, by the sum of each group's best expert scores; null without groups."""
    moe_router_topk_scaling_factor: PositiveFloat | None = None
    """Factor by which the experts' weights are multiplied; null means 1."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = "fp32"
    """Number format of the router's logits; null means policy.precision."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] = "aux_loss"
    """Load balancing of experts: none, a loss per microbatch, or a loss per sequence."""
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss; 0 turns it off."""
    moe_router_enable_expert_bias: bool = False
    """Balance experts by a selection bias that is updated after every step; requires sigmoid scores."""
    moe_router_bias_update_rate: NonNegativeFloat = 1e-3
    """Size of each update to the experts' selection biases."""


class ModelConfig(ExpertsConfig, LinearAttentionConfig, MambaLayersConfig, LatentHeadsConfig):
    """A decoder like Llama or Qwen, or a hybrid of attention, Mamba-2, feed-forward and expert layers.

    With kv_lora_rank, a decoder like DeepSeek's; with linear_attention_freq, one like Qwen3.5.
    """

    num_layers: Counted
    """Number of layers; with hybrid_layer_pattern, its length: attention and feed-forward layers count separately."""
    hybrid_layer_pattern: str | None = None
    """One character per layer: M Mamba-2, * attention, - feed-forward, E experts; null means a plain decoder."""
    hidden_size: Size
    """Width of the residual stream."""
    num_attention_heads: Size
    """Number of query heads."""
    num_query_groups: Size | None = None
    """Number of key and value heads; null means one per query head."""
    kv_channels: Size | None = None
    """Size of each head; null means hidden_size / num_attention_heads."""
    ffn_hidden_size: Size | None = None
    """Width of feed-forward layers; null means 4 * hidden_size."""
    activation_func: Literal["silu", "quick_gelu", "squared_relu"] = "silu"
    """Activation in feed-forward layers and experts: silu (SwiGLU, gated), quick_gelu (gpt-oss, gated, with 1 added to
    the gated input) or squared_relu (without a gate)."""
    activation_func_clamp_value: PositiveFloat | None = None
    """quick_gelu: upper bound on gates, and bound on gated inputs' absolute values; null means no bounds."""
    vocab_size: Size
    """Number of embedding rows; at least the size of the tokenizer's vocabulary."""
    max_position_embeddings: Size = 2048
    """Maximum sequence length, in tokens."""
    tie_word_embeddings: bool = False
    """Share the embedding's weights with the output layer."""
    rotary_base: PositiveFloat = 10000.0
    """Base of the rotary frequencies; hybrid models have no rotary positions."""
    rope_scaling: RopeScalingConfig | None = None
    """Scaling of the rotary frequencies (Llama 3.1 and later, YaRN); null means no scaling."""
    layernorm_epsilon: PositiveFloat = 1e-5
    """Epsilon that RMSNorm adds to the mean square."""
    init_method_std: PositiveFloat = 0.02
    """Standard deviation of random initial weights."""
    qk_layernorm: bool = False
    """Normalise each head's queries and keys (Qwen3), or their latents (DeepSeek)."""
    add_qkv_bias: bool = False
    """Add a bias to the query, key and value projections (Qwen2)."""
    add_bias_linear: bool = False
    """Add a bias to all attention projections, routers and experts (gpt-oss)."""
    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    """Attention softmax; with learnable, each head has an attention sink: a learned score besides the keys' scores."""
    sliding_window: Size | None = None
    """Newest tokens, its own included, that a query attends to in every other layer from the first; null means all."""
    mtp_num_layers: Counted | None = None
    """Number of layers for multi-token prediction; null means none."""
    mtp_loss_scaling_factor: NonNegativeFloat = 0.1
    """Coefficient of the prediction layers' mean loss."""

    @property
    def shape(self) -> ModelShape:
        """Return the sizes and layers that follow from the keys."""
        heads, ffn_size = self.num_attention_heads, self.ffn_hidden_size or 4 * self.hidden_size
        head_dim = self.kv_channels or self.hidden_size // heads
        if self.kv_lora_rank is not None:
            head_dim = self.qk_head_dim + self.qk_pos_emb_head_dim
        dense_layers, pattern = self.num_layers, self.hybrid_layer_pattern
        if self.num_moe_experts is not None:
            dense_layers = (self.moe_layer_freq or ()).count(0)
        positions, scaling = self.max_position_embeddings, self.rope_scaling
        if scaling is not None and scaling.rope_type == "yarn":
            positions = max(positions, int(scaling.factor * scaling.original_max_position_embeddings))
        return ModelShape(
            longest_sequence=positions,
            query_groups=self.num_query_groups or heads,
            head_dim=head_dim,
            ffn_size=ffn_size,
            expert_ffn_size=self.moe_ffn_hidden_size or ffn_size,
            gated=self.activation_func != "squared_relu",
            dense_layers=dense_layers,
            has_dense_layers=dense_layers > 0 if pattern is None else MLP in pattern,
            has_mamba=MAMBA in (pattern or ""),
            mamba_size=(self.mamba_num_heads or 0) * self.mamba_head_dim,
        )

    def is_linear(self, layer: int) -> bool:
        """Return true for a layer, counted from 0, with a gated delta net."""
        return self.linear_attention_freq is not None and (layer + 1) % self.linear_attention_freq != 0

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Return the indices of the MoE layers, from 0."""
        if self.num_moe_experts is None:
            return ()
        kinds = self.hybrid_layer_pattern or self.moe_layer_freq or (1,) * self.num_layers
        return tuple(layer for layer, kind in enumerate(kinds) if kind in (1, EXPERTS))

    @property
    def route_dtype(self) -> Literal["int8", "int16"]:
        """Return the smallest number format for experts, and for -1."""
        return "int8" if (self.num_moe_experts or 0) <= 128 else "int16"

    @property
    def route_bytes(self) -> int:
        """Return the size of a token's routes."""
        return len(self.expert_layers) * self.moe_router_topk * (1 if self.route_dtype == "int8" else 2)

    @property
    def load_balancing_loss(self) -> bool:
        """True if the routers add a load-balancing loss."""
        return (
            self.num_moe_experts is not None
            and self.moe_router_load_balancing_type != "none"
            and self.moe_aux_loss_coeff > 0
        )

    read_unless = (
        ("mtp_loss_scaling_factor", "mtp_num_layers", None),
        *((key, "num_moe_experts", None) for key in ExpertsConfig.model_fields if key != "num_moe_experts"),
        *((key, "kv_lora_rank", None) for key in LatentHeadsConfig.model_fields if key != "kv_lora_rank"),
        *((key, "hybrid_layer_pattern", None) for key in MambaLayersConfig.model_fields),
        *((key, "linear_attention_freq", None) for key in [*LinearAttentionConfig.model_fields][1:]),
        *(("activation_func_clamp_value", "activation_func", kind) for kind in ("silu", "squared_relu")),
        ("moe_router_bias_update_rate", "moe_router_enable_expert_bias", False),
        ("moe_aux_loss_coeff", "moe_router_load_balancing_type", "none"),
    )

    rules = (
        *(
            Rule(
                "has-no-effect",
                key,
                lambda own, key=key, plain=plain: (
                    own.hybrid_layer_pattern is not None and getattr(own, key) != plain
                ),
                (_PATTERN,),
            )
            for key, plain in (("rotary_base", 10000.0), ("rope_scaling", None))
        ),
        *(
            either("incompatible", {key: only, kind: None})
            for kind, required in (
                ("kv_lora_rank", _WITH_LATENT_ATTENTION),
                ("linear_attention_freq", _WITH_LINEAR_ATTENTION),
            )
            for key, only in required.items()
        ),
        Rule(
            "not-divisible",
            "linear_num_value_heads",
            lambda own: (
                own.linear_attention_freq is not None
                and own.linear_num_value_heads % own.linear_num_key_heads
            ),
            ("linear_num_key_heads",),
            "make it a multiple",
        ),
        Rule(
            "not-divisible",
            "qk_pos_emb_head_dim",
            lambda own: own.kv_lora_rank is not None and own.qk_pos_emb_head_dim % 2,
            fix="make it even",
            why="rotary positions rotate pairs",
        ),
        Rule(
            "incompatible",
            "rope_scaling.rope_type",
            lambda own: (
                own.kv_lora_rank is not None and own.rope_scaling and own.rope_scaling.rope_type != "yarn"
            ),
            ("kv_lora_rank",),
            "use yarn, or none",
        ),
        either(
            "incompatible",
            {"rope_scaling.truncate": True, "kv_lora_rank": None},
            where=lambda own: own.rope_scaling and own.rope_scaling.rope_type == "yarn",
        ),
        Rule(
            "requires",
            "rope_scaling.mscale",
            lambda own: (
                own.kv_lora_rank is None and own.rope_scaling and "mscale" in own.rope_scaling.written
            ),
            ("kv_lora_rank",),
            "remove it",
        ),
        Rule(
            "not-divisible",
            "hidden_size",
            lambda own: (
                own.kv_lora_rank is None
                and own.kv_channels is None
                and own.hidden_size % own.num_attention_heads
            ),
            ("num_attention_heads", "kv_channels"),
            "make it a multiple of num_attention_heads, or set kv_channels",
        ),
        Rule(
            "not-divisible",
            "num_attention_heads",
            lambda own: own.kv_lora_rank is None and own.num_attention_heads % own.shape.query_groups,
            ("num_query_groups",),
            "make it a multiple, or set num_query_groups: null",
        ),
        *(
            Rule(
                "not-divisible",
                key,
                lambda own, given=key == "kv_channels": (
                    own.kv_lora_rank is None
                    and bool(own.kv_channels) == given
                    and own.hybrid_layer_pattern is None
                    and own.shape.head_dim % 2
                ),
                ("hidden_size", "num_attention_heads", "kv_channels"),
                "make the size of a head even",
                lambda own: f"a head of {own.shape.head_dim} is odd, and rotary positions rotate pairs",
            )
            for key in ("kv_channels", "num_attention_heads")
        ),
        Rule(
            "not-supported",
            _PATTERN,
            lambda own: {*(own.hybrid_layer_pattern or "")} - {*_KINDS},
            fix=f"write one of {', '.join(_KINDS)} for each layer",
            says=lambda own: (
                f"unknown layers: {quoted(' '.join(sorted({*(own.hybrid_layer_pattern or '')} - {*_KINDS})))}"
            ),
        ),
        Rule(
            "contradicts",
            "num_layers",
            lambda own: (
                own.hybrid_layer_pattern is not None and len(own.hybrid_layer_pattern) != own.num_layers
            ),
            (_PATTERN,),
            lambda own: {"num_layers": len(own.hybrid_layer_pattern or "")},
            "each character is a layer",
        ),
        Rule(
            "contradicts",
            "num_moe_experts",
            lambda own: (
                own.hybrid_layer_pattern is not None
                and (EXPERTS in own.hybrid_layer_pattern) != (own.num_moe_experts is not None)
            ),
            (_PATTERN,),
            f"set it if and only if the pattern contains an {EXPERTS}",
        ),
        Rule(
            "missing",
            "mamba_num_heads",
            lambda own: own.shape.has_mamba and own.mamba_num_heads is None,
            (_PATTERN,),
        ),
        Rule(
            "not-divisible",
            "mamba_num_heads",
            lambda own: own.shape.has_mamba and (own.mamba_num_heads or 0) % own.mamba_num_groups,
            ("mamba_num_groups",),
            "make it a multiple",
        ),
        *(
            either("incompatible", {key: plain, other: None})
            for key, plain in (("softmax_type", "vanilla"), ("sliding_window", None))
            for other in (_PATTERN, "mtp_num_layers")
        ),
        _expert_rules,
        Rule(
            "too-large",
            "moe_router_topk",
            lambda own: own.moe_router_topk > (own.num_moe_experts or math.inf),
            ("num_moe_experts",),
        ),
        Rule(
            "no-signal",
            "moe_router_topk",
            lambda own: (
                own.num_moe_experts is not None
                and own.moe_router_topk == 1
                and own.moe_router_score_function == "softmax"
                and not own.moe_router_pre_softmax
            ),
            ("moe_router_pre_softmax", "moe_router_score_function"),
            {"moe_router_pre_softmax": True, "moe_router_score_function": "sigmoid"},
            "a softmax over one expert is constant, so that the router has no gradient",
        ),
        either(
            "requires",
            {"moe_router_enable_expert_bias": False, "moe_router_score_function": "sigmoid"},
            where=lambda own: own.num_moe_experts is not None,
        ),
        either(
            "incompatible",
            {"moe_aux_loss_coeff": 0, "moe_router_enable_expert_bias": False},
            "these routers have no padding mask, so the loss would count padding",
            where=lambda own: own.load_balancing_loss,
        ),
        either(
            "incompatible",
            {"moe_aux_loss_coeff": 0, "mtp_num_layers": None},
            "those layers' routers count one padding token per row",
            where=lambda own: own.load_balancing_loss,
        ),
    )
