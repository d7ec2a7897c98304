"""Configuration of the policy: model, tokenizer, batch sizes, token budgets, Megatron and generation."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal, cast

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
    Switched,
)
from nemo_rl_mcore.config.custom_code import Arguments
from nemo_rl_mcore.config.generation import GenerationConfig
from nemo_rl_mcore.config.megatron import MegatronConfig
from nemo_rl_mcore.config.model import ModelConfig


class Role(Enum):
    """Output of a worker's model: token probabilities, or the value of a state."""

    POLICY = "policy"
    VALUE = "value"


SEQUENCE_LENGTH_ROUND = 64
"""Multiple to which a microbatch's padded length is rounded up if the budget allows."""


class MicrobatchTokensConfig(Switched):
    """Microbatches sized by tokens instead of rows, if enabled."""

    train_mb_tokens: PositiveInt | None = None
    """Tokens per training microbatch; null means max_total_sequence_length times the rows of train_micro_batch_size."""
    logprob_mb_tokens: PositiveInt | None = None
    """Tokens per log-probability microbatch; null means max_total_sequence_length * logprob_batch_size."""


class SequencePackingConfig(MicrobatchTokensConfig):
    """Packing of samples into rows without padding, by first-fit decreasing; samples do not attend to each other."""


class DynamicBatchingConfig(MicrobatchTokensConfig):
    """Microbatches of samples with similar lengths, up to a token budget, padded to the longest sample."""


class RouterReplayConfig(Switched):
    """Replay of experts: training sends each token of a response to the experts that first processed it.

    Separate engines return each token's experts with their responses; if the ranks generate, the pass for prev_logprobs
    records them. The reference policy and the critic choose their own.
    """


@dataclass(frozen=True)
class TokenBudgets:
    """A policy's token budgets, with the path of the section that sets them.

    packed: true if several batch rows share one model row.
    train_by_rows: true if the section does not set `train`, which is then a default for samples with one row.
    """

    section: str
    packed: bool
    train: int
    logprob: int
    length_round: int
    train_by_rows: bool = False

    def of_training(self, rows_per_sample: int) -> int:
        """Return the tokens per training microbatch for a loss with `rows_per_sample` rows per sample."""
        return self.train * rows_per_sample if self.train_by_rows else self.train


REFERENCE_SHARE = 0.1
"""Maximum share of a GPU's memory, free at the start, that a reference policy may take and still be kept on the GPU."""


def _refuse_fp16(value: object) -> object:
    if value in ("float16", "fp16", "half"):
        raise ValueError(
            "fp16 gradients overflow before the global token count divides them; set precision: bfloat16"
        )
    return value


Precision = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_refuse_fp16)]


class TokenizerConfig(StrictModel):
    """The tokenizer and chat template."""

    name: FolderOrName
    """`char` for the embedded character tokenizer, or a Hugging Face folder or hub id; default: policy.model_name."""
    chat_template: str | None = None
    """Chat template as Jinja text, read with data.apply_chat_template; null means the tokenizer's own template."""
    chat_template_kwargs: Arguments | None = None
    """Variables for the chat template, such as enable_thinking; `check` lists any that the template does not use."""

    rules = tuple(
        Rule(
            "incompatible",
            key,
            lambda own, key=key: own.name == CHAR_TOKENIZER and getattr(own, key),
            ("name",),
            "remove it",
            "the built-in tokenizer has no chat template",
        )
        for key in ("chat_template", "chat_template_kwargs")
    )


class StartWeightsConfig(StrictModel):
    """Initial weights; random if no key is set."""

    model_name: FolderOrName | None = None
    """Hugging Face weights to start from: a local folder or a hub id; null for init_checkpoint or random weights."""
    hf_config_overrides: Arguments | None = None
    """Keys that replace those in model_name's config.json: max_position_embeddings, rope_scaling, rope_theta."""
    init_checkpoint: FolderPath | None = None
    """Folder step_N of another run whose weights to start from, with a new optimizer; null if not used (ours)."""


class PolicyConfig(StartWeightsConfig):
    """The trained model."""

    model: ModelConfig
    """The architecture, read from model_name or set by num_layers, hidden_size, ..."""
    tokenizer: TokenizerConfig
    """The tokenizer."""
    precision: Precision = "float32"
    """Number format of weights and activations."""
    train_global_batch_size: PositiveInt
    """Number of samples per optimizer step, over all data-parallel ranks."""
    train_micro_batch_size: PositiveInt
    """Number of samples per forward and backward pass on one rank."""
    logprob_batch_size: PositiveInt = 1
    """Number of samples per log-probability pass on one rank; default: train_micro_batch_size."""
    recompute_prev_logprobs: Literal["auto", "always"] = "auto"
    """Compute prev_logprobs before training: always, or only if something needs them earlier (auto) (ours)."""
    offload: Literal["none", "grads_optimizer", "all"] = "none"
    """State to move off the device while weights are only read; all adds the weights while engines answer (ours)."""
    generation_batch_size: PositiveInt | None = None
    """Number of samples that one rank generates at a time; null means all of the rank's samples."""
    max_total_sequence_length: PositiveInt
    """Maximum tokens in prompt and response together."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Maximum global gradient norm, to which larger gradients are scaled down; 0 means no limit."""
    megatron_cfg: MegatronConfig
    """Megatron-Core's parallel layout, optimizer and kernels."""
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    """Pack several samples into one row."""
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    """Microbatches of similar-length samples, sized by tokens."""
    router_replay: RouterReplayConfig = RouterReplayConfig()
    """Replay of the experts that were chosen before training."""
    generation: GenerationConfig
    """Generation engine and sampling."""
    call_timeout_s: Seconds = 600.0
    """Seconds without progress (a microbatch, a token, a file) after which a call to the ranks fails; also the timeout
    of collectives between ranks (ours)."""

    @property
    def reserved_tokens(self) -> int:
        """Return the tokens reserved for the response: max_new_tokens, or 1 with fit_to_sequence."""
        return 1 if self.generation.fit_to_sequence else self.generation.max_new_tokens

    @property
    def token_budgets(self) -> TokenBudgets | None:
        """Return the token budgets of microbatches; None if microbatches have a fixed number of rows."""
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
    def engines_return_routes(self) -> bool:
        """Return True if router replay reads routes of engines, and False if ranks record them."""
        return self.router_replay.enabled and not self.generation.decodes_on_ranks

    @property
    def model_class(self) -> Literal["gpt", "hybrid"]:
        """Return the name of the Megatron model class."""
        chosen = self.megatron_cfg.model_class
        if chosen == "auto":
            return "gpt" if self.model.hybrid_layer_pattern is None else "hybrid"
        return chosen

    @property
    def parts_of_a_layer(self) -> int:
        """Return the number of Megatron layers per layer: in a HybridModel, attention is a separate layer."""
        return 2 if self.model_class == "hybrid" and self.model.hybrid_layer_pattern is None else 1

    @property
    def weights(self) -> str | None:
        """Return the key that names the initial weights, which fix the model's sizes; None for random weights."""
        given = (key for key in ("model_name", "init_checkpoint") if getattr(self, key) is not None)
        return next(given, None)

    @model_validator(mode="before")
    @classmethod
    def _fill_logprob_batch_size(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            return given
        section = dict(cast("Mapping[str, object]", given))
        rows = section.get("train_micro_batch_size")
        if section.get("logprob_batch_size") is None and rows is not None:
            section["logprob_batch_size"] = rows
        return section
