"""Configuration of the architecture: for random weights, and what loaded ones must fit."""

import math
from collections.abc import Iterator, Mapping
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
)
from nemo_rl_mcore.errors import quoted

_OF_YARN = ("mscale", "mscale_all_dim", "truncate")
ROPE_TURNS: Mapping[str, Mapping[str, float]] = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_slow": 1.0, "beta_fast": 32.0},
}
"""Turns in the original context up to which rotations are slow, and from which on they stay, by config.json's keys."""


class RopeScalingConfig(StrictModel):
    """Rotary frequencies stretched for long contexts."""

    rope_type: Literal["llama3", "yarn"] = "llama3"
    """How: as Llama 3.1 and later, or by YaRN, which also makes the attention more peaked; both with the turns of all
    published models, 1 and 4, or 1 and 32."""
    factor: Annotated[Float, Field(gt=0, le=1e6)]
    """Frequencies of the slowest rotations are divided by it."""
    mscale: NonNegativeFloat = 1.0
    """yarn with kv_lora_rank: how much the factor adds to the rotated parts of queries and keys."""
    mscale_all_dim: NonNegativeFloat = 0.0
    """The same: how much it adds to whole queries and keys, of which mscale leaves the rotated parts out."""
    truncate: bool = True
    """yarn: round the first and the last of the channel pairs between slow and fast outwards (gpt-oss does not)."""
    original_max_position_embeddings: Size
    """The original context: the longest sequence before the stretching."""

    read_unless = tuple((key, "rope_type", "llama3") for key in _OF_YARN)

    @property
    def scales(self) -> bool:
        """Return whether queries and keys are scaled otherwise than in a model without latent attention."""
        return (self.mscale, self.mscale_all_dim) != (1.0, 0.0)

    @property
    def written(self) -> dict[str, object]:
        """Return what config.json says of its kind, by the keys that it has there."""
        scales = ("mscale", "mscale_all_dim") if self.scales else ()
        exact = () if self.truncate else ("truncate",)
        others = {key: getattr(self, key) for key in (*scales, *exact, "original_max_position_embeddings")}
        return {"factor": self.factor, **ROPE_TURNS[self.rope_type], **others}

    @property
    def slow_and_fast(self) -> tuple[float, float]:
        """Return the turns in the original context up to which rotations are slow, and from which on they are fast."""
        slow, fast = ROPE_TURNS[self.rope_type].values()
        return slow, fast

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
            lambda own: own.rope_type == "yarn" and own.scales and not (own.mscale and own.mscale_all_dim),
            ("mscale_all_dim",),
            "set both, or neither",
            "others read that in another way",
        ),
    )


MAMBA_TAPS = 4
"""Tokens that the convolution of a Mamba layer sees."""
MAMBA_NORM_EPSILON = 1e-5
"""Added to the mean square in the norm after the scan of a Mamba layer, whatever layernorm_epsilon is."""


_WITH_LATENT_ATTENTION: Mapping[str, object] = {
    "num_query_groups": None,
    "kv_channels": None,
    "add_qkv_bias": False,
    "qk_layernorm": True,
    "mtp_num_layers": None,
    "softmax_type": "vanilla",
    "sliding_window": None,
}
"""What goes with latent attention: its heads have sizes of their own, and its latents are normalised."""

_PATTERN = "hybrid_layer_pattern"

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
_KINDS = (MAMBA, ATTENTION, MLP, EXPERTS)
"""The layers of a hybrid model, one character each."""


def _expert_rules(model: "ModelConfig") -> "Iterator[Rule[ModelConfig]]":
    """Yield rules of groups of experts, and of layers that have none."""
    experts, groups, chosen = model.num_moe_experts, model.moe_router_num_groups, model.moe_router_group_topk
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


class LatentHeadsConfig(StrictModel):
    """Heads that read latents in place of the hidden state, as in DeepSeek's models."""

    q_lora_rank: Size | None = None
    """Width of the queries' latent; null makes queries of the hidden state."""
    kv_lora_rank: Size | None = None
    """Width of the latent that keys and values are made of (DeepSeek); null makes them of the hidden state."""
    qk_head_dim: Size = 128
    """Size of the part of a head's query and key that has no position."""
    qk_pos_emb_head_dim: Size = 64
    """Size of the part that is rotated; the keys of all heads share theirs."""
    v_head_dim: Size = 128
    """Size of a head's value."""


class MambaLayersConfig(StrictModel):
    """Sizes of the Mamba-2 layers of a hybrid model."""

    mamba_num_heads: Size | None = None
    """Heads of a Mamba layer."""
    mamba_head_dim: Size = 64
    """Size of one of them."""
    mamba_state_dim: Size = 128
    """Size of the state of each channel of a head."""
    mamba_num_groups: Size = 8
    """Groups of heads that write to and read from their states alike."""


class ExpertsConfig(StrictModel):
    """Feed-forward layers of which each token sees a few."""

    num_moe_experts: Counted | None = None
    """Experts of every feed-forward layer; null is dense."""
    moe_layer_freq: IntTuple | None = None
    """For each layer 1 if it has experts, 0 if it is dense; null is experts in all. Dense layers come first."""
    moe_router_topk: Size = 2
    """Experts that a token is sent to."""
    moe_ffn_hidden_size: Size | None = None
    """Width of one expert; null is ffn_hidden_size."""
    moe_latent_size: Size | None = None
    """Width of the latent that all experts of a layer read and write; null is the hidden state itself."""
    moe_shared_expert_intermediate_size: Size | None = None
    """Width of the expert that sees every token; null is none."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to its scores."""
    moe_router_pre_softmax: bool = False
    """Take the softmax over all experts before the best are selected, instead of over the selected ones."""
    moe_router_num_groups: Size | None = None
    """Groups of equal size that the experts are in, some of which a token is sent to; null is one group of all."""
    moe_router_group_topk: Size | None = None
    """Groups that a token is sent to: those with the best scores, each added up over its best experts."""
    moe_router_topk_scaling_factor: PositiveFloat | None = None
    """Factor of the weights of a token's experts; null is 1."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = "fp32"
    """Number format of the router's logits; null is policy.precision."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] = "aux_loss"
    """Load balancing of the experts: none, a loss over a microbatch, or a loss over each sequence."""
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss beside the loss; 0 turns it off."""
    moe_router_enable_expert_bias: bool = False
    """Balance by a bias of each expert in the selection, moved after every step; needs the sigmoid scores."""
    moe_router_bias_update_rate: NonNegativeFloat = 1e-3
    """Step size of an expert's bias."""


class ModelConfig(ExpertsConfig, MambaLayersConfig, LatentHeadsConfig):
    """A decoder: of the Llama and Qwen kind, or a hybrid of attention, Mamba-2, feed-forward layers and experts.

    With kv_lora_rank it is one of the DeepSeek kind.
    """

    num_layers: Counted
    """Transformer layers; with hybrid_layer_pattern its characters, where attention and feed-forward are two layers."""
    hybrid_layer_pattern: str | None = None
    """A character a layer: M is Mamba-2, * attention, - feed-forward, E experts; null: attention and the rest."""
    hidden_size: Size
    """Width of the residual stream."""
    num_attention_heads: Size
    """Query heads."""
    num_query_groups: Size | None = None
    """Key and value heads; null is one per query head."""
    kv_channels: Size | None = None
    """Size of one head; null is hidden_size / num_attention_heads."""
    ffn_hidden_size: Size | None = None
    """Width of the feed-forward layer; null is 4 * hidden_size."""
    activation_func: Literal["silu", "quick_gelu", "squared_relu"] = "silu"
    """Of feed-forward layers and experts: silu and quick_gelu have a gate (SwiGLU; gpt-oss, whose gates multiply
    what they are given plus 1), squared_relu has none."""
    activation_func_clamp_value: PositiveFloat | None = None
    """quick_gelu: gates are clamped from above to it, and what they multiply from both sides; null clamps nothing."""
    vocab_size: Size
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    max_position_embeddings: Size = 2048
    """Longest sequence."""
    tie_word_embeddings: bool = False
    """Share the embedding with the output layer."""
    rotary_base: PositiveFloat = 10000.0
    """Base of the rotary frequencies; the Mamba layers of a hybrid know the order, and its attention has none."""
    rope_scaling: RopeScalingConfig | None = None
    """Stretched rotary frequencies (Llama 3.1 and later, YaRN); null leaves them."""
    layernorm_epsilon: PositiveFloat = 1e-5
    """Added to the mean square in RMSNorm."""
    init_method_std: PositiveFloat = 0.02
    """Standard deviation of the random weights."""
    qk_layernorm: bool = False
    """Normalise queries and keys per head (Qwen3), or the latents that they are made of."""
    add_qkv_bias: bool = False
    """Bias on the query, key and value projections (Qwen2)."""
    add_bias_linear: bool = False
    """Bias on those, on the attention's output, on routers and on experts (gpt-oss)."""
    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    """learnable: a number of each head stands beside the scores of the keys, and takes a share of them (a sink)."""
    sliding_window: Size | None = None
    """Newest tokens that a query sees, its own among them; null is all."""
    window_attn_skip_freq: IntTuple | None = None
    """For each layer 1 if it has the window, 0 if its queries see all; null is a window in all."""
    mtp_num_layers: Counted | None = None
    """Layers that are trained to predict further tokens (multi-token prediction); null is none."""
    mtp_loss_scaling_factor: NonNegativeFloat = 0.1
    """Weight of the mean loss of those layers beside the loss."""

    @property
    def longest_sequence(self) -> int:
        """Return the positions that the rotations are made for; YaRN gives some beyond those of the weights."""
        scaling = self.rope_scaling
        if scaling is None or scaling.rope_type != "yarn":
            return self.max_position_embeddings
        stretched = int(scaling.factor * scaling.original_max_position_embeddings)
        return max(self.max_position_embeddings, stretched)

    @property
    def multi_latent_attention(self) -> bool:
        """Return whether keys and values are made of latents."""
        return self.kv_lora_rank is not None

    @property
    def has_positions(self) -> bool:
        """Return whether queries and keys are rotated by their positions."""
        return self.hybrid_layer_pattern is None

    @property
    def query_groups(self) -> int:
        """Return the number of key and value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Size of one head's query and key."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_dim(self) -> int:
        """Size of one head's value."""
        return self.v_head_dim if self.multi_latent_attention else self.head_dim

    @property
    def dense_layers(self) -> int:
        """Return how many layers have no experts: the first ones, or all."""
        if self.num_moe_experts is None:
            return self.num_layers
        return (self.moe_layer_freq or ()).count(0)

    @property
    def ffn_size(self) -> int:
        """Return the width of the feed-forward layer."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def gated(self) -> bool:
        """Return whether feed-forward layers and experts have a gate."""
        return self.activation_func != "squared_relu"

    @property
    def mamba_size(self) -> int:
        """Return the number of channels of all heads of a Mamba layer."""
        return (self.mamba_num_heads or 0) * self.mamba_head_dim

    @property
    def has_mamba(self) -> bool:
        """Return whether some layers are Mamba's."""
        return MAMBA in (self.hybrid_layer_pattern or "")

    @property
    def has_dense_layers(self) -> bool:
        """Return whether some layers have a feed-forward part that sees every token, and is no shared expert."""
        pattern = self.hybrid_layer_pattern
        return self.dense_layers > 0 if pattern is None else MLP in pattern

    @property
    def expert_ffn_size(self) -> int:
        """Return the width of one expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def expert_input_size(self) -> int:
        """Return the width of what an expert is given, and gives."""
        return self.moe_latent_size or self.hidden_size

    @property
    def load_balancing_loss(self) -> bool:
        """Return whether the routers add a load-balancing loss."""
        return (
            self.num_moe_experts is not None
            and self.moe_router_load_balancing_type != "none"
            and self.moe_aux_loss_coeff > 0
        )

    @property
    def experts_alone(self) -> bool:
        """Return whether every layer has attention of its own, experts, and nothing else."""
        plain = self.hybrid_layer_pattern is None and not self.multi_latent_attention
        alone = self.num_moe_experts is not None and not self.dense_layers
        return plain and alone and not self.moe_shared_expert_intermediate_size and not self.mtp_num_layers

    read_unless = (
        ("mtp_loss_scaling_factor", "mtp_num_layers", None),
        *((key, "num_moe_experts", None) for key in ExpertsConfig.model_fields if key != "num_moe_experts"),
        *((key, "kv_lora_rank", None) for key in LatentHeadsConfig.model_fields if key != "kv_lora_rank"),
        *((key, "hybrid_layer_pattern", None) for key in MambaLayersConfig.model_fields),
        *(("activation_func_clamp_value", "activation_func", kind) for kind in ("silu", "squared_relu")),
        ("window_attn_skip_freq", "sliding_window", None),
        ("moe_router_bias_update_rate", "moe_router_enable_expert_bias", False),
        ("moe_aux_loss_coeff", "moe_router_load_balancing_type", "none"),
    )

    rules = (
        *(
            Rule(
                "has-no-effect",
                key,
                lambda own, key=key, plain=plain: not own.has_positions and getattr(own, key) != plain,
                (_PATTERN,),
            )
            for key, plain in (("rotary_base", 10000.0), ("rope_scaling", None))
        ),
        *(
            Rule(
                "incompatible",
                key,
                lambda own, key=key, only=only: own.multi_latent_attention and getattr(own, key) != only,
                ("kv_lora_rank",),
                {key: only, "kv_lora_rank": None},
            )
            for key, only in _WITH_LATENT_ATTENTION.items()
        ),
        Rule(
            "not-divisible",
            "qk_pos_emb_head_dim",
            lambda own: own.multi_latent_attention and own.qk_pos_emb_head_dim % 2,
            fix="make it even",
            why="rotary positions rotate pairs",
        ),
        Rule(
            "incompatible",
            "rope_scaling.rope_type",
            lambda own: (
                own.multi_latent_attention and own.rope_scaling and own.rope_scaling.rope_type != "yarn"
            ),
            ("kv_lora_rank",),
            "use yarn, or none",
        ),
        Rule(
            "incompatible",
            "rope_scaling.truncate",
            lambda own: (
                own.multi_latent_attention
                and own.rope_scaling
                and own.rope_scaling.rope_type == "yarn"
                and not own.rope_scaling.truncate
            ),
            ("kv_lora_rank",),
            {"rope_scaling.truncate": True},
        ),
        Rule(
            "requires",
            "rope_scaling.mscale",
            lambda own: not own.multi_latent_attention and own.rope_scaling and own.rope_scaling.scales,
            ("kv_lora_rank",),
            "remove it",
        ),
        Rule(
            "not-divisible",
            "hidden_size",
            lambda own: (
                not own.multi_latent_attention
                and own.kv_channels is None
                and own.hidden_size % own.num_attention_heads
            ),
            ("num_attention_heads", "kv_channels"),
            "make it a multiple of num_attention_heads, or set kv_channels",
        ),
        Rule(
            "not-divisible",
            "num_attention_heads",
            lambda own: not own.multi_latent_attention and own.num_attention_heads % own.query_groups,
            ("num_query_groups",),
            "make it a multiple, or set num_query_groups: null",
        ),
        *(
            Rule(
                "not-divisible",
                key,
                lambda own, given=key == "kv_channels": (
                    not own.multi_latent_attention
                    and bool(own.kv_channels) == given
                    and own.has_positions
                    and own.head_dim % 2
                ),
                ("hidden_size", "num_attention_heads", "kv_channels"),
                "make the size of a head even",
                lambda own: f"a head of {own.head_dim} is odd, and rotary positions rotate pairs",
            )
            for key in ("kv_channels", "num_attention_heads")
        ),
        Rule(
            "not-supported",
            _PATTERN,
            lambda own: {*(own.hybrid_layer_pattern or "")} - {*_KINDS},
            fix=f"write {', '.join(_KINDS)}, one for each layer",
            says=lambda own: (
                f"{quoted(sorted({*(own.hybrid_layer_pattern or '')} - {*_KINDS}))} are no layers that are built"
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
            f"set it where the pattern has an {EXPERTS}, and only there",
        ),
        Rule(
            "missing",
            "mamba_num_heads",
            lambda own: own.has_mamba and own.mamba_num_heads is None,
            (_PATTERN,),
        ),
        Rule(
            "not-divisible",
            "mamba_num_heads",
            lambda own: own.has_mamba and (own.mamba_num_heads or 0) % own.mamba_num_groups,
            ("mamba_num_groups",),
            "make it a multiple",
        ),
        Rule(
            "not-allowed",
            "window_attn_skip_freq",
            lambda own: (
                own.window_attn_skip_freq is not None
                and (
                    len(own.window_attn_skip_freq) != own.num_layers or {*own.window_attn_skip_freq} - {0, 1}
                )
            ),
            ("num_layers",),
            "give a 0 or a 1 for each layer, or set it to null",
        ),
        Rule(
            "contradicts",
            "window_attn_skip_freq",
            lambda own: own.window_attn_skip_freq == (0,) * own.num_layers,
            ("sliding_window",),
            "set sliding_window: null",
            "no layer has the window",
        ),
        *(
            Rule(
                "incompatible",
                key,
                lambda own, key=key, plain=plain, other=other: (
                    getattr(own, key) != plain and getattr(own, other) is not None
                ),
                (other,),
                {key: plain, other: None},
            )
            for key, plain in (("softmax_type", "vanilla"), ("sliding_window", None))
            for other in (_PATTERN, "mtp_num_layers")
        ),
        *(
            Rule(
                "requires",
                key,
                lambda own, key=key, needing=needing: getattr(own, key) == needing and not own.experts_alone,
                ("num_moe_experts", "moe_layer_freq", "moe_shared_expert_intermediate_size"),
                "remove it, or set num_moe_experts",
                "every layer needs attention of its own and experts, and nothing else",
            )
            for key, needing in (("add_bias_linear", True), ("activation_func", "quick_gelu"))
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
        Rule(
            "requires",
            "moe_router_enable_expert_bias",
            lambda own: (
                own.num_moe_experts is not None
                and own.moe_router_enable_expert_bias
                and own.moe_router_score_function != "sigmoid"
            ),
            ("moe_router_score_function",),
            {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": False},
        ),
        Rule(
            "incompatible",
            "moe_aux_loss_coeff",
            lambda own: own.load_balancing_loss and own.moe_router_enable_expert_bias,
            ("moe_router_enable_expert_bias",),
            {"moe_aux_loss_coeff": 0, "moe_router_enable_expert_bias": False},
            "such routers cannot be told what is padding, and would balance it",
        ),
        Rule(
            "incompatible",
            "moe_aux_loss_coeff",
            lambda own: own.load_balancing_loss and own.mtp_num_layers,
            ("mtp_num_layers",),
            {"moe_aux_loss_coeff": 0, "mtp_num_layers": None},
            "the routers of those layers count one padding token of each row",
        ),
    )
