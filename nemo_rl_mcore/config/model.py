"""Configuration of the architecture, for random initialisation."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import PositiveFloat, PositiveInt, Problem, StrictModel


class ModelConfig(StrictModel):
    """A decoder of the Llama and Qwen kind: RMSNorm, rotary positions, gated feed-forward layers."""

    num_layers: PositiveInt
    """Transformer layers."""
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
    vocab_size: PositiveInt
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    max_position_embeddings: PositiveInt = 2048
    """Longest sequence."""
    tie_word_embeddings: bool = False
    """Share the embedding with the output layer."""
    rotary_base: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    layernorm_epsilon: PositiveFloat = 1e-5
    """Added to the mean square in RMSNorm."""
    init_method_std: PositiveFloat = 0.02
    """Standard deviation of the random weights."""
    qk_layernorm: bool = False
    """Normalise queries and keys per head (Qwen3)."""
    add_qkv_bias: bool = False
    """Bias on the query, key and value projections (Qwen2)."""
    num_moe_experts: PositiveInt | None = None
    """Experts of a mixture-of-experts layer; null is dense."""

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
    def layer_parameters(self) -> int:
        """Weights of one dense transformer layer."""
        qkv_rows = (self.num_attention_heads + 2 * self.query_groups) * self.head_dim
        attention = self.hidden_size * (qkv_rows + self.num_attention_heads * self.head_dim)
        extras = (qkv_rows if self.add_qkv_bias else 0) + (2 * self.head_dim if self.qk_layernorm else 0)
        return attention + 3 * self.hidden_size * self.ffn_size + 2 * self.hidden_size + extras

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding, which are those of the output layer too."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """All weights of the dense model."""
        embeddings = self.embedding_parameters * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * self.layer_parameters + embeddings + self.hidden_size

    def problems(self) -> Iterator[Problem]:
        """Yield sizes that do not divide."""
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            yield Problem(
                "hidden_size",
                f"{self.hidden_size} is not divisible by num_attention_heads: {self.num_attention_heads}",
                "make it a multiple, or set kv_channels",
                ("num_attention_heads", "kv_channels"),
            )
        if self.num_attention_heads % self.query_groups:
            yield Problem(
                "num_attention_heads",
                f"{self.num_attention_heads} is not divisible by num_query_groups: {self.num_query_groups}",
                "make it a multiple, or set num_query_groups: null",
                ("num_query_groups",),
            )
        if self.head_dim % 2:
            yield Problem(
                "kv_channels" if self.kv_channels else "num_attention_heads",
                f"the head size {self.head_dim} is odd, and rotary positions rotate pairs",
                "make the head size even",
                ("hidden_size", "num_attention_heads", "kv_channels"),
            )
        if self.num_moe_experts is not None:
            yield Problem(
                "num_moe_experts",
                "mixture-of-experts models are not supported yet",
                "set num_moe_experts: null",
            )
