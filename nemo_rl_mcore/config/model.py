"""Configuration of the architecture: for random weights, and what loaded ones must fit."""

from collections.abc import Iterator
from typing import Literal

from nemo_rl_mcore.config.base import NonNegativeFloat, PositiveFloat, PositiveInt, Problem, StrictModel
from nemo_rl_mcore.config.hybrid_layers import MAMBA, MLP, pattern_problems

MAMBA_TAPS = 4
"""Tokens that the convolution of a Mamba layer sees."""
MAMBA_NORM_EPSILON = 1e-5
"""Added to the mean square in the norm behind the scan of a Mamba layer, whatever layernorm_epsilon is."""
_OF_MAMBA = ("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups")
_OF_EXPERTS = (
    "moe_router_topk",
    "moe_ffn_hidden_size",
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


class RopeScalingConfig(StrictModel):
    """Rotary frequencies stretched for long contexts."""

    rope_type: Literal["llama3", "yarn"] = "llama3"
    """How: as Llama 3.1 and later, or by YaRN, which also makes the attention more peaked."""
    factor: PositiveFloat
    """Frequencies of the slowest rotations are divided by it."""
    low_freq_factor: PositiveFloat | None = None
    """llama3: rotations with at most this many turns in the original context count as slow."""
    high_freq_factor: PositiveFloat | None = None
    """llama3: rotations with at least this many turns in the original context stay as they are."""
    beta_slow: PositiveFloat = 1.0
    """yarn: rotations with at most this many turns in the original context count as slow."""
    beta_fast: PositiveFloat = 32.0
    """yarn: rotations with at least this many turns in the original context stay as they are."""
    original_max_position_embeddings: PositiveInt
    """The original context: the longest sequence before the stretching."""

    read_unless = (
        *((key, "rope_type", "yarn") for key in ("low_freq_factor", "high_freq_factor")),
        *((key, "rope_type", "llama3") for key in ("beta_slow", "beta_fast")),
    )

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys that its kind has, in config.json too."""
        turns = (
            ("low_freq_factor", "high_freq_factor")
            if self.rope_type == "llama3"
            else ("beta_fast", "beta_slow")
        )
        return ("factor", *turns, "original_max_position_embeddings")

    @property
    def slow_and_fast(self) -> tuple[float, float]:
        """Turns in the original context up to which rotations are slow, and from which on they are fast."""
        if self.rope_type == "yarn":
            return self.beta_slow, self.beta_fast
        return self.low_freq_factor or 1.0, self.high_freq_factor or 1.0

    def problems(self) -> Iterator[Problem]:
        """Yield factors that are missing, or leave nothing between slow and fast rotations."""
        if self.rope_type == "yarn":
            if self.factor < 1:
                yield Problem(
                    "too-small", "factor", f"{self.factor} is below 1 with rope_type: yarn", "raise it"
                )
            if self.beta_slow >= self.beta_fast:
                what = f"{self.beta_slow} is not below beta_fast: {self.beta_fast}"
                yield Problem("too-large", "beta_slow", what, "lower it", ("beta_fast",))
            return
        for key in ("low_freq_factor", "high_freq_factor"):
            if getattr(self, key) is None:
                yield Problem("missing", key, "missing with rope_type: llama3", "set it", ("rope_type",))
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            yield Problem(
                "too-large",
                "low_freq_factor",
                f"{self.low_freq_factor} is not below high_freq_factor: {self.high_freq_factor}",
                "lower it",
                ("high_freq_factor",),
            )


class ModelConfig(StrictModel):
    """A decoder: of the Llama and Qwen kind, or a hybrid of attention, Mamba-2, feed-forward layers and experts."""

    num_layers: PositiveInt
    """Transformer layers; with hybrid_layer_pattern its characters, where attention and feed-forward are two layers."""
    hybrid_layer_pattern: str | None = None
    """A character a layer: M is Mamba-2, * attention, - feed-forward, E experts; null: attention and the rest."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_query_groups: PositiveInt | None = None
    """Key and value heads; null is one per query head."""
    kv_channels: PositiveInt | None = None
    """Size of one head; null is hidden_size / num_attention_heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Width of the feed-forward layer; null is 4 * hidden_size."""
    activation_func: Literal["silu", "squared_relu"] = "silu"
    """Of feed-forward layers and experts: silu has a gate (SwiGLU), and squared_relu has none."""
    vocab_size: PositiveInt
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    max_position_embeddings: PositiveInt = 2048
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
    """Normalise queries and keys per head (Qwen3)."""
    add_qkv_bias: bool = False
    """Bias on the query, key and value projections (Qwen2)."""
    num_moe_experts: PositiveInt | None = None
    """Experts of every feed-forward layer; null is dense."""
    moe_router_topk: PositiveInt = 2
    """Experts that a token is sent to."""
    moe_ffn_hidden_size: PositiveInt | None = None
    """Width of one expert; null is ffn_hidden_size."""
    moe_shared_expert_intermediate_size: PositiveInt | None = None
    """Width of the expert that sees every token; null is none."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """How the router turns its logits into scores."""
    moe_router_pre_softmax: bool = False
    """Take the softmax over all experts before the best are selected, instead of over the selected ones."""
    moe_router_num_groups: PositiveInt | None = None
    """Groups of equal size that the experts are in, some of which a token is sent to; null is one group of all."""
    moe_router_group_topk: PositiveInt | None = None
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
    mamba_num_heads: PositiveInt | None = None
    """Heads of a Mamba layer."""
    mamba_head_dim: PositiveInt = 64
    """Size of one of them."""
    mamba_state_dim: PositiveInt = 128
    """Size of the state of each channel of a head."""
    mamba_num_groups: PositiveInt = 8
    """Groups of heads that write to and read from their states alike."""
    mtp_num_layers: PositiveInt | None = None
    """Layers that are trained to predict further tokens (multi-token prediction); null is none."""
    mtp_loss_scaling_factor: NonNegativeFloat = 0.1
    """Weight of the mean loss of those layers beside the loss."""

    @property
    def longest_sequence(self) -> int:
        """Positions that the rotations are made for; YaRN gives some beyond those of the weights."""
        scaling = self.rope_scaling
        if scaling is None or scaling.rope_type != "yarn":
            return self.max_position_embeddings
        stretched = int(scaling.factor * scaling.original_max_position_embeddings)
        return max(self.max_position_embeddings, stretched)

    @property
    def query_groups(self) -> int:
        """Key and value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def gated(self) -> bool:
        """Return whether feed-forward layers and experts have a gate."""
        return self.activation_func == "silu"

    @property
    def mamba_size(self) -> int:
        """Channels of all heads of a Mamba layer."""
        return (self.mamba_num_heads or 0) * self.mamba_head_dim

    @property
    def has_mamba(self) -> bool:
        """Return whether some layers are Mamba's."""
        return MAMBA in (self.hybrid_layer_pattern or "")

    @property
    def has_dense_layers(self) -> bool:
        """Return whether some layers have a feed-forward part that sees every token, and is no shared expert."""
        pattern = self.hybrid_layer_pattern
        return self.num_moe_experts is None if pattern is None else MLP in pattern

    @property
    def expert_ffn_size(self) -> int:
        """Width of one expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

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
        *((key, "hybrid_layer_pattern", None) for key in _OF_MAMBA),
        *((key, "position_embedding_type", "none") for key in ("rotary_base", "rope_scaling")),
        ("moe_router_bias_update_rate", "moe_router_enable_expert_bias", False),
        ("moe_aux_loss_coeff", "moe_router_load_balancing_type", "none"),
    )

    def problems(self) -> Iterator[Problem]:
        """Yield sizes that do not divide, and settings of experts that cannot train."""
        yield from self._size_problems()
        yield from pattern_problems(self)
        if self.num_moe_experts is not None:
            yield from self._expert_problems(self.num_moe_experts)

    def _size_problems(self) -> Iterator[Problem]:
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
