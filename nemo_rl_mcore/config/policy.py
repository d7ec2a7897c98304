"""Configuration of the policy: model, tokenizer, batch sizes, microbatches sized by tokens, Megatron, generation."""

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal

from pydantic import BeforeValidator, model_validator

from nemo_rl_mcore.config.base import (
    CHAR_TOKENIZER,
    FolderOrName,
    FolderPath,
    NonNegativeFloat,
    PositiveInt,
    Rule,
    Seconds,
    StrictModel,
    SwitchedConfig,
    with_other_spellings,
)
from nemo_rl_mcore.config.custom_code import Arguments
from nemo_rl_mcore.config.generation import GenerationConfig
from nemo_rl_mcore.config.megatron import MegatronConfig
from nemo_rl_mcore.config.model import ModelConfig


class Role(Enum):
    """What the model of a worker is for: to say how probable tokens are, or how much is to be expected of a state."""

    POLICY = "policy"
    VALUE = "value"


SEQUENCE_LENGTH_ROUND = 64
"""A microbatch's padded length is rounded up to a multiple of this where the budget has room."""


class MicrobatchTokensConfig(SwitchedConfig):
    """How many tokens a microbatch may hold; where enabled, batch sizes in rows cut nothing."""

    train_mb_tokens: PositiveInt | None = None
    """Tokens of a training microbatch; null is max_total_sequence_length times the rows of train_micro_batch_size."""
    logprob_mb_tokens: PositiveInt | None = None
    """Tokens of a log-probability microbatch; null is max_total_sequence_length * logprob_batch_size."""


class SequencePackingConfig(MicrobatchTokensConfig):
    """Several samples in one row without padding, by first-fit decreasing; a sample sees no token of another one."""


class DynamicBatchingConfig(MicrobatchTokensConfig):
    """Samples of like length in one microbatch, as many as a token budget takes, padded to its own longest one."""


@dataclass(frozen=True)
class TokenBudgets:
    """The token budgets of a policy: the section they come from, and their values.

    packed: whether rows of the batch share rows of the model; else each has a row of its own.
    train_by_rows: whether `train` was left out of the section, and is that of samples of one row.
    """

    section: str
    packed: bool
    train: int
    logprob: int
    length_round: int
    train_by_rows: bool = False

    def of_training(self, rows_per_sample: int) -> int:
        """Return the tokens of a training microbatch for a loss whose samples have so many rows."""
        return self.train * rows_per_sample if self.train_by_rows else self.train


REFERENCE_SHARE = 0.1
"""Of a GPU's memory that is free when the run starts: a reference policy that takes more is not kept there by auto."""


def _refuse_fp16(value: object) -> object:
    if value in ("float16", "fp16", "half"):
        raise ValueError(
            "fp16 gradients overflow before the global token count divides them; set precision: bfloat16"
        )
    return value


Precision = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_refuse_fp16)]


class TokenizerConfig(StrictModel):
    """Where the tokenizer comes from."""

    name: FolderOrName
    """`char` for the embedded character tokenizer, or a Hugging Face folder; left out, it is policy.model_name."""
    chat_template: str | None = None
    """Jinja text of a chat template in place of the tokenizer's own, see data.apply_chat_template; null keeps that."""
    chat_template_kwargs: Arguments | None = None
    """Variables of the chat template, such as enable_thinking; `check` tells those that it does not read."""

    rules = tuple(
        Rule(
            "incompatible",
            key,
            lambda own, key=key: own.name == CHAR_TOKENIZER and getattr(own, key),
            ("name",),
            "remove it",
            "that tokenizer has no chat template",
        )
        for key in ("chat_template", "chat_template_kwargs")
    )


class StartWeightsConfig(StrictModel):
    """Weights to start from; a policy without any draws them at random."""

    model_name: FolderOrName | None = None
    """Hugging Face weights to start from: a local folder or a hub id; null has none."""
    hf_config_overrides: Arguments | None = None
    """What takes the place of keys of model_name's config.json: max_position_embeddings, rope_scaling, rope_theta."""
    init_checkpoint: FolderPath | None = None
    """Folder step_N of another run, whose weights are taken; the optimizer starts over (ours)."""


class PolicyConfig(StartWeightsConfig):
    """The model that is trained."""

    model: ModelConfig
    """The architecture; with model_name it is read from there, and otherwise given: num_layers, hidden_size, ..."""
    tokenizer: TokenizerConfig
    """The tokenizer."""
    precision: Precision = "float32"
    """Number format of weights and activations."""
    train_global_batch_size: PositiveInt
    """Samples per optimizer step, over all data-parallel ranks."""
    train_micro_batch_size: PositiveInt
    """Samples per forward and backward pass of one rank."""
    logprob_batch_size: PositiveInt = 1
    """Samples per log-probability pass of one rank; left out, it is train_micro_batch_size."""
    recompute_prev_logprobs: Literal["auto", "always"] = "auto"
    """auto takes those of the training pass where nothing reads them before; always computes them in a pass (ours)."""
    offload: Literal["none", "grads_optimizer", "all"] = "none"
    """What leaves the device while weights are only read; all: the weights too, while engines there answer (ours)."""
    generation_batch_size: PositiveInt | None = None
    """Samples that one rank generates at a time; null is all of its samples."""
    max_total_sequence_length: PositiveInt
    """Tokens of prompt and response together."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this global norm; 0 leaves them."""
    megatron_cfg: MegatronConfig
    """Parallel layout, optimizer and kernels."""
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    """Several samples in one row."""
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    """Microbatches sized by tokens."""
    generation: GenerationConfig
    """Engine and sampling."""
    call_timeout_s: Seconds = 600.0
    """Seconds without progress (a microbatch, a token, a file) after which a call to the ranks is an error, and that
    ranks at work wait in a collective for one that hangs (ours)."""

    @property
    def reserved_tokens(self) -> int:
        """Tokens of a sequence that a prompt leaves: a whole response, or one where responses fit what is left."""
        return 1 if self.generation.fit_to_sequence else self.generation.max_new_tokens

    @property
    def longest_of_prompt(self) -> int | None:
        """Tokens of prompt and response together where the prompt bounds the response; None where nothing does."""
        return self.max_total_sequence_length if self.generation.fit_to_sequence else None

    @property
    def token_budgets(self) -> TokenBudgets | None:
        """Return what sizes the microbatches, if it is tokens; None where they have a fixed number of rows."""
        packed = self.sequence_packing.enabled
        if not packed and not self.dynamic_batching.enabled:
            return None
        section = self.sequence_packing if packed else self.dynamic_batching
        longest = self.max_total_sequence_length
        return TokenBudgets(
            section=f"policy.{'sequence_packing' if packed else 'dynamic_batching'}",
            packed=packed,
            train=section.train_mb_tokens or longest * self.train_micro_batch_size,
            logprob=section.logprob_mb_tokens or longest * self.logprob_batch_size,
            length_round=SEQUENCE_LENGTH_ROUND,
            train_by_rows=section.train_mb_tokens is None,
        )

    @property
    def model_class(self) -> Literal["gpt", "hybrid"]:
        """Return which of Megatron's classes the model is."""
        chosen = self.megatron_cfg.model_class
        if chosen == "auto":
            return "gpt" if self.model.hybrid_layer_pattern is None else "hybrid"
        return chosen

    @property
    def parts_of_a_layer(self) -> int:
        """Return the layers of Megatron that make one layer: in a HybridModel attention is one by itself."""
        return 2 if self.model_class == "hybrid" and self.model.hybrid_layer_pattern is None else 1

    @property
    def weights(self) -> str | None:
        """Return the key that names the weights to start from, if there is one: the model's sizes are theirs."""
        given = (key for key in ("model_name", "init_checkpoint") if getattr(self, key) is not None)
        return next(given, None)

    @model_validator(mode="before")
    @classmethod
    def _fill_logprob_batch_size(cls, given: object) -> object:
        return with_other_spellings(given, ("logprob_batch_size", "train_micro_batch_size"))
