"""Configuration of the architecture: for random weights, and what loaded ones must fit."""

from collections.abc import Iterator, Mapping
from typing import Literal

from nemo_rl_mcore.config.base import (
    Counted,
    IntTuple,
    NonNegativeFloat,
    PositiveFloat,
    Problem,
    Size,
    StrictModel,
)
from nemo_rl_mcore.config.hybrid_layers import MAMBA, MLP, pattern_problems
from nemo_rl_mcore.config.rope_scaling import RopeScalingConfig
from nemo_rl_mcore.config.windows_and_biases import clamped_problems, sink_problems, window_problems

_OF_LATENT_ATTENTION = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")

MAMBA_TAPS = 4
"""Tokens that the convolution of a Mamba layer sees."""
MAMBA_NORM_EPSILON = 1e-5
"""Added to the mean square in the norm after the scan of a Mamba layer, whatever layernorm_epsilon is."""
_OF_MAMBA = ("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups")
_OF_EXPERTS = (
    "moe_layer_freq",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_dtype",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
)


_OF_CLAMPED = ("activation_func_clamp_value", "glu_linear_offset")

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


class ModelConfig(StrictModel):
    """A decoder: of the Llama and Qwen kind, or a hybrid of attention, Mamba-2, feed-forward layers and experts.

    With multi_latent_attention it is one of the DeepSeek kind.
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
    """Of feed-forward layers and experts: silu and quick_gelu have a gate (SwiGLU, gpt-oss), squared_relu has none."""
    activation_func_clamp_value: PositiveFloat | None = None
    """quick_gelu: gates are clamped from above to it, and what they multiply from both sides; null clamps nothing."""
    glu_linear_offset: float = 0.0
    """quick_gelu: added to what the gates multiply."""
    vocab_size: Size
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    max_position_embeddings: Size = 2048
    """Longest sequence."""
    tie_word_embeddings: bool = False
    """Share the embedding with the output layer."""
    position_embedding_type: Literal["rope", "none"] = "rope"
    """Rotary positions in attention, or none, as in hybrids, whose Mamba layers know the order."""
    rotary_base: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
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
    multi_latent_attention: bool = False
    """Make keys and values, and perhaps queries, of latents that are narrower than they are (DeepSeek)."""
    q_lora_rank: Size | None = None
    """Width of the queries' latent; null makes queries of the hidden state."""
    kv_lora_rank: Size = 512
    """Width of the latent of keys and values."""
    qk_head_dim: Size = 128
    """Size of the part of a head's query and key that has no position."""
    qk_pos_emb_head_dim: Size = 64
    """Size of the part that is rotated; the keys of all heads share theirs."""
    v_head_dim: Size = 128
    """Size of a head's value."""
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
    """How the router turns its logits into scores."""
    moe_router_pre_softmax: bool = False
    """Take the softmax over all experts before the best are selected, instead of over the selected ones."""
    moe_router_num_groups: Size | None = None
    """Groups of equal size that the experts are in, some of which a token is sent to; null is one group of all."""
    moe_router_group_topk: Size | None = None
    """Groups that a token is sent to: those with the best scores, each added up over its best experts."""
    moe_router_topk_scaling_factor: PositiveFloat | None = None
    """What the shares of a token's experts are multiplied by; null is 1."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = "fp32"
    """Number format of the router's logits; null is policy.precision."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] = "aux_loss"
    """What balances the experts: nothing, a loss over a microbatch, or a loss over each of its sequences."""
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss beside the loss; 0 turns it off."""
    moe_router_enable_expert_bias: bool = False
    """Balance by a bias of each expert in the selection, moved after every step; needs the sigmoid scores."""
    moe_router_bias_update_rate: NonNegativeFloat = 1e-3
    """How far a step moves the bias of an expert."""
    mamba_num_heads: Size | None = None
    """Heads of a Mamba layer."""
    mamba_head_dim: Size = 64
    """Size of one of them."""
    mamba_state_dim: Size = 128
    """Size of the state of each channel of a head."""
    mamba_num_groups: Size = 8
    """Groups of heads that write to and read from their states alike."""
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

    read_unless = (
        ("mtp_loss_scaling_factor", "mtp_num_layers", None),
        *((key, "num_moe_experts", None) for key in _OF_EXPERTS),
        *((key, "multi_latent_attention", False) for key in _OF_LATENT_ATTENTION),
        *((key, "hybrid_layer_pattern", None) for key in _OF_MAMBA),
        *((key, "position_embedding_type", "none") for key in ("rotary_base", "rope_scaling")),
        *((key, "activation_func", kind) for key in _OF_CLAMPED for kind in ("silu", "squared_relu")),
        ("window_attn_skip_freq", "sliding_window", None),
        ("moe_router_bias_update_rate", "moe_router_enable_expert_bias", False),
        ("moe_aux_loss_coeff", "moe_router_load_balancing_type", "none"),
    )

    def problems(self) -> Iterator[Problem]:
        """Yield sizes that do not divide, and settings of experts that cannot train."""
        yield from self._latent_problems() if self.multi_latent_attention else self._size_problems()
        yield from pattern_problems(self)
        yield from window_problems(self)
        yield from sink_problems(self)
        yield from clamped_problems(self)
        if self.num_moe_experts is not None:
            yield from self._expert_problems(self.num_moe_experts)

    def _latent_problems(self) -> Iterator[Problem]:
        for key, only in _WITH_LATENT_ATTENTION.items():
            if (given := getattr(self, key)) != only:
                what = f"{given} does not go with multi_latent_attention: true"
                yield Problem("incompatible", key, what, f"set it to {only}", ("multi_latent_attention",))
        if self.qk_pos_emb_head_dim % 2:
            what = f"{self.qk_pos_emb_head_dim} is odd, and rotary positions rotate pairs"
            yield Problem("not-divisible", "qk_pos_emb_head_dim", what, "make it even")
        if self.rope_scaling is not None and self.rope_scaling.rope_type != "yarn":
            what = f"{self.rope_scaling.rope_type} does not go with multi_latent_attention: true"
            related = ("multi_latent_attention",)
            yield Problem("incompatible", "rope_scaling.rope_type", what, "use yarn, or none", related)
        elif self.rope_scaling is not None and not self.rope_scaling.truncate:
            what = "false does not go with multi_latent_attention: true"
            related = ("multi_latent_attention",)
            yield Problem("incompatible", "rope_scaling.truncate", what, "set it to true", related)

    def _size_problems(self) -> Iterator[Problem]:
        if self.rope_scaling is not None and self.rope_scaling.scales:
            what = "has no meaning without multi_latent_attention: true"
            yield Problem("requires", "rope_scaling.mscale", what, "remove it", ("multi_latent_attention",))
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            yield Problem(
                "not-divisible",
                "hidden_size",
                f"{self.hidden_size} is not divisible by num_attention_heads: {self.num_attention_heads}",
                "make it a multiple, or set kv_channels",
                ("num_attention_heads", "kv_channels"),
            )
        if self.num_attention_heads % self.query_groups:
            yield Problem(
                "not-divisible",
                "num_attention_heads",
                f"{self.num_attention_heads} is not divisible by num_query_groups: {self.num_query_groups}",
                "make it a multiple, or set num_query_groups: null",
                ("num_query_groups",),
            )
        if self.head_dim % 2 and self.position_embedding_type == "rope":
            yield Problem(
                "not-divisible",
                "kv_channels" if self.kv_channels else "num_attention_heads",
                f"the head size {self.head_dim} is odd, and rotary positions rotate pairs",
                "make the head size even",
                ("hidden_size", "num_attention_heads", "kv_channels"),
            )

    def _group_problems(self, experts: int) -> Iterator[Problem]:
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        given, missing = ("moe_router_num_groups", "moe_router_group_topk")[:: 1 if groups else -1]
        if groups is None and chosen is None:
            return
        if groups is None or chosen is None:
            yield Problem("requires", given, f"needs {missing}, which is null", f"set {missing}", (missing,))
        elif experts % groups:
            what = f"{experts} is not divisible by moe_router_num_groups: {groups}"
            yield Problem("not-divisible", "num_moe_experts", what, "make it a multiple", (given,))
        elif chosen > groups:
            what = f"{chosen} is above moe_router_num_groups: {groups}"
            yield Problem("too-large", "moe_router_group_topk", what, f"set it to {groups} at most", (given,))
        elif not chosen <= self.moe_router_topk <= chosen * (experts // groups):
            yield Problem(
                "not-allowed",
                "moe_router_topk",
                f"{self.moe_router_topk} experts of {chosen} groups with {experts // groups} each",
                f"set it to {chosen} at least and {chosen * (experts // groups)} at most",
                ("moe_router_group_topk", "moe_router_num_groups"),
            )

    def _expert_problems(self, experts: int) -> Iterator[Problem]:
        yield from self._group_problems(experts)
        layers = self.moe_layer_freq
        if layers is not None and layers != (0,) * layers.count(0) + (1,) * (
            self.num_layers - layers.count(0)
        ):
            what = f"{list(layers)} is not dense layers (0), then layers with experts (1), {self.num_layers} in all"
            yield Problem(
                "not-supported", "moe_layer_freq", what, "change it, or set it to null", ("num_layers",)
            )
        elif layers is not None and 1 not in layers:
            what = "no layer has experts"
            yield Problem(
                "contradicts", "moe_layer_freq", what, "set num_moe_experts: null", ("num_moe_experts",)
            )
        if self.moe_router_topk > experts:
            yield Problem(
                "too-large",
                "moe_router_topk",
                f"{self.moe_router_topk} is above num_moe_experts: {experts}",
                f"set it to {experts} at most",
                ("num_moe_experts",),
            )
        if (self.moe_router_topk, self.moe_router_score_function) == (1, "softmax") and (
            not self.moe_router_pre_softmax
        ):
            yield Problem(
                "no-signal",
                "moe_router_topk",
                "1 leaves a softmax over one expert, which is constant, so that the router has no gradient",
                "set moe_router_pre_softmax: true, or moe_router_score_function: sigmoid",
                ("moe_router_pre_softmax", "moe_router_score_function"),
            )
        if self.moe_router_enable_expert_bias and self.moe_router_score_function != "sigmoid":
            yield Problem(
                "requires",
                "moe_router_enable_expert_bias",
                f"true needs moe_router_score_function: sigmoid, and it is {self.moe_router_score_function}",
                "set that, or moe_router_enable_expert_bias: false",
                ("moe_router_score_function",),
            )
        if self.load_balancing_loss and self.moe_router_enable_expert_bias:
            yield Problem(
                "incompatible",
                "moe_aux_loss_coeff",
                f"{self.moe_aux_loss_coeff} does not go with moe_router_enable_expert_bias: true (such routers "
                "cannot be told what is padding, and would balance it)",
                "set moe_aux_loss_coeff: 0, or moe_router_enable_expert_bias: false",
                ("moe_router_enable_expert_bias",),
            )
        if self.load_balancing_loss and self.mtp_num_layers:
            yield Problem(
                "incompatible",
                "moe_aux_loss_coeff",
                f"{self.moe_aux_loss_coeff} does not go with mtp_num_layers: {self.mtp_num_layers} (the routers "
                "of those layers count one padding token of each row)",
                "set moe_aux_loss_coeff: 0, or mtp_num_layers: null",
                ("mtp_num_layers",),
            )
