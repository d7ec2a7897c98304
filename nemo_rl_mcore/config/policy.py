"""Configuration of the policy: model, tokenizer, batch sizes, Megatron, generation."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, ValidationInfo, model_validator

from nemo_rl_mcore.config.base import (
    DEFER,
    ConfigError,
    NonNegativeFloat,
    PositiveInt,
    Problem,
    StrictModel,
)
from nemo_rl_mcore.config.batching import (
    DynamicBatchingConfig,
    SequencePackingConfig,
    TokenBudgets,
    batching_problems,
    token_budgets,
)
from nemo_rl_mcore.config.generation import GenerationConfig
from nemo_rl_mcore.config.guardrails import fused_guardrails
from nemo_rl_mcore.config.hf_config import missing_family
from nemo_rl_mcore.config.megatron import MegatronConfig
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.parallel import cut_problems, training_problems
from nemo_rl_mcore.config.pretrained import fill_from_model_name
from nemo_rl_mcore.config.vllm import vllm_policy_problems

CHAR_VOCABULARY = 32
"""Tokens of the embedded character tokenizer."""


def _refuse_fp16(value: object) -> object:
    if value in ("float16", "fp16", "half"):
        raise ValueError(
            "fp16 gradients overflow before the global token count divides them; set precision: bfloat16"
        )
    return value


Precision = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_refuse_fp16)]


class TokenizerConfig(StrictModel):
    """Where the tokenizer comes from."""

    name: str
    """`char` for the embedded character tokenizer, or a Hugging Face folder; left out, it is policy.model_name."""


class PolicyConfig(StrictModel):
    """The model that is trained."""

    model: ModelConfig
    """The architecture; with model_name it is read from there, and otherwise given: num_layers, hidden_size, ..."""
    model_name: str | None = None
    """Hugging Face weights to start from: a local folder or a hub id; null draws them at random."""
    init_checkpoint: str | None = None
    """Folder step_N of another run, whose weights this one starts from; its optimizer begins anew (ours)."""
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

    @property
    def token_budgets(self) -> TokenBudgets | None:
        """What sizes the microbatches, if it is tokens; None where they have a fixed number of rows."""
        return token_budgets(self)

    @model_validator(mode="before")
    @classmethod
    def _fill_model(cls, given: object, info: ValidationInfo) -> object:
        # Deferred validation has filled it already, and reports problems with the place they stand in.
        if not isinstance(given, Mapping) or info.context == DEFER:
            return cast("object", given)
        section, problems = fill_from_model_name(cast("Mapping[str, object]", given))
        if problems:
            raise ConfigError(problems)
        return section

    @model_validator(mode="before")
    @classmethod
    def _fill_logprob_batch_size(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            return given
        section = dict(cast("Mapping[str, object]", given))
        if section.get("logprob_batch_size") is None and "train_micro_batch_size" in section:
            section["logprob_batch_size"] = section["train_micro_batch_size"]
        return section

    def problems(self) -> Iterator[Problem]:
        """Yield what does not go together inside the policy."""
        for guardrail in fused_guardrails(self):
            if not guardrail.ok:
                yield guardrail.problem()
        yield from self.problems_of_any_model()
        yield from training_problems(self.model, self.megatron_cfg)
        yield from batching_problems(self)
        yield from self._stop_problems()
        yield from self._copy_problems()
        if self.generation.backend == "vllm":
            yield from vllm_policy_problems(self)

    def problems_of_any_model(self) -> Iterator[Problem]:
        """Yield what stops a model that is neither trained nor asked for answers, too."""
        weights = [key for key in ("model_name", "init_checkpoint") if getattr(self, key) is not None]
        yield from cut_problems(self.model, self.megatron_cfg, weights=weights[0] if weights else None)
        yield from self._weight_problems()
        yield from self._length_problems()

    def _weight_problems(self) -> Iterator[Problem]:
        if self.model_name is not None and (reason := missing_family(self.model)):
            yield Problem("model_name", f"{self.model_name!r}: {reason}", "change policy.model", ("model",))
        if self.tokenizer.name == "char" and self.model.vocab_size < CHAR_VOCABULARY:
            yield Problem(
                "model.vocab_size",
                f"{self.model.vocab_size} is below the {CHAR_VOCABULARY} tokens of tokenizer.name: char",
                f"set vocab_size: {CHAR_VOCABULARY}",
                ("tokenizer.name",),
            )

    def _stop_problems(self) -> Iterator[Problem]:
        vocabulary = self.model.vocab_size
        foreign = [stop for stop in self.generation.stop_token_ids or () if not 0 <= stop < vocabulary]
        if foreign:
            yield Problem(
                "generation.stop_token_ids",
                f"{foreign} is outside 0 to {vocabulary - 1}, the ids of policy.model.vocab_size: {vocabulary}",
                "remove them, or raise vocab_size",
                ("model.vocab_size",),
            )

    def _length_problems(self) -> Iterator[Problem]:
        longest, positions = self.max_total_sequence_length, self.model.max_position_embeddings
        if longest > positions:
            yield Problem(
                "max_total_sequence_length",
                f"{longest} is above policy.model.max_position_embeddings: {positions}",
                "lower the one or raise the other",
                ("model.max_position_embeddings",),
            )

    def _copy_problems(self) -> Iterator[Problem]:
        megatron, optimizer = self.megatron_cfg, self.megatron_cfg.optimizer
        in_bf16 = self.precision == "bfloat16"
        copies = (
            ("megatron_cfg.pipeline_dtype", megatron.pipeline_dtype, "precision", self.precision),
            ("megatron_cfg.optimizer.bf16", optimizer.bf16, "precision", in_bf16),
            ("megatron_cfg.optimizer.clip_grad", optimizer.clip_grad, "max_grad_norm", self.max_grad_norm),
        )
        for key, copy, source, value in copies:
            if copy is not None and copy != value:
                yield Problem(
                    key,
                    f"{str(copy).lower()} contradicts policy.{source}: {getattr(self, source)}",
                    f"remove it, or set it to {str(value).lower()}",
                    (source,),
                )
