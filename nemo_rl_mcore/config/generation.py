"""Configuration of generation: the engine and how it samples."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, cast

from pydantic import Field, model_validator

from nemo_rl_mcore.config.base import (
    Float,
    IntTuple,
    PositiveInt,
    Problem,
    StrictModel,
    StrTuple,
)
from nemo_rl_mcore.config.engines import EmbeddedConfig, EngineConfig
from nemo_rl_mcore.config.imports import Arguments
from nemo_rl_mcore.config.vllm import ColocatedConfig, MismatchConfig, VllmConfig
from nemo_rl_mcore.config.vllm_kwargs import kwargs_problems


class GenerationConfig(StrictModel):
    """Which engine writes the responses, and from which distribution.

    The log-probabilities that the embedded engine returns are those of the whole distribution at the temperature,
    before top_p and top_k filter it, so they agree with those that training computes.
    """

    backend: Literal["embedded", "vllm"] = "embedded"
    """The engine: `embedded` decodes on the training model itself, or on a copy (see colocated); `vllm` on a copy."""
    max_new_tokens: PositiveInt
    """Tokens of a response at most, end-of-sequence included."""
    fit_to_sequence: bool = False
    """A response has what its prompt leaves of policy.max_total_sequence_length, and no more; false reserves
    max_new_tokens for each, and prompts get the rest (ours)."""
    temperature: Annotated[Float, Field(ge=0.01)] = 1.0
    """Divides the logits, in sampling and in every log-probability of answers that were sampled so.

    Given answers (SFT, offline DPO, distillation off policy) are read at temperature 1.
    """
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this probability mass; 1 keeps all."""
    top_k: PositiveInt | None = None
    """Sample from this many most probable tokens; null keeps all."""
    stop_token_ids: IntTuple | None = None
    """Token ids that end a response besides those that the files of the tokenizer and of the model name."""
    stop_strings: StrTuple | None = None
    """Texts that end a response and belong to it."""
    vllm_cfg: VllmConfig = VllmConfig()
    """The vLLM engines."""
    vllm_kwargs: Arguments | None = None
    """Further arguments of vLLM's engines, such as compilation_config; none that gives other answers."""
    embedded_cfg: EmbeddedConfig = EmbeddedConfig()
    """The embedded engines of their own."""
    colocated: ColocatedConfig = ColocatedConfig()
    """Where the engines run."""
    refit_transport: Literal["shared_memory", "ray", "cuda_ipc", "nccl"] | None = None
    """How copies get weights; null is shared_memory on CPU (ray on several machines), on GPUs cuda_ipc or nccl."""
    refit_bucket_bytes: PositiveInt | None = None
    """Size of each of the two buffers of weights on their way (ours); null is 64 MiB, or a larger weight's size."""
    verify_refit: bool = True
    """After every refit compare what the engines hold with the trainer's weights, bit by bit (ours).

    False only checks that every tensor arrived and every weight was written.
    """
    compare_at_start: bool = True
    """Compare engines apart from the ranks with training over the whole vocabulary when a run starts or resumes (ours).

    After a few of its prompts; a difference that the number format does not explain ends the run.
    """
    mismatch: MismatchConfig = MismatchConfig()
    """When the engine and training disagree."""

    @model_validator(mode="before")
    @classmethod
    def _read_earlier_versions(cls, given: object) -> object:
        """Leave out journal: false, which stands in the recipes of all runs of earlier versions."""
        if not isinstance(given, Mapping):
            return given
        section = cast("Mapping[str, object]", given)
        return {key: value for key, value in section.items() if key != "journal" or value is not False}

    @property
    def engine(self) -> EngineConfig:
        """Return the section of the engine that answers, which says what it can do."""
        return {"embedded": self.embedded_cfg, "vllm": self.vllm_cfg}[self.backend]

    @property
    def decodes_on_ranks(self) -> bool:
        """Return whether the training ranks answer themselves; otherwise engines do, to which weights are sent."""
        return self.engine.may_be_the_ranks and self.colocated.enabled

    @property
    def takes_turns(self) -> bool:
        """Return whether engines of their own compute on the ranks' GPUs, in turn with them."""
        return self.colocated.enabled and not self.decodes_on_ranks

    def problems(self) -> Iterator[Problem]:
        """Yield a text that every response contains, and arguments that vLLM may not get."""
        yield from kwargs_problems(self.vllm_kwargs)
        if "" in (self.stop_strings or ()):
            yield Problem(
                "not-allowed",
                "stop_strings",
                "an empty text would end every response at once",
                "leave it out",
            )
