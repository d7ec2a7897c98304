"""Configuration of the vLLM engine."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from nemo_rl_mcore.config.base import (
    Float,
    NonNegativeInt,
    PositiveInt,
    Problem,
    StrictModel,
    StrTuple,
    has_no_effect,
)
from nemo_rl_mcore.config.engines import EngineConfig


class VllmConfig(EngineConfig):
    """The vLLM engines; read when policy.generation.backend is vllm."""

    noun = "vLLM engine"
    sleeps = True
    always_rereads = True
    needs_family = True
    package = "vllm"

    async_engine: bool = False
    """Answer requests one by one as they come, so that weights can change while some are in flight."""
    precision: Literal["float32", "bfloat16", "fp8"] | None = None
    """Number format of weights and activations; null is policy.precision. With fp8 vLLM quantizes the layers' weights
    as it loads them, with a scale for each block of 128 x 128, and activations as it computes; all else is bfloat16."""
    is_mx: bool = False
    """With precision: fp8 a scale for each 32 numbers instead (MXFP8)."""
    quantization_ignored_layer_kws: StrTuple | None = None
    """With precision: fp8 layers whose names contain one of these texts stay bfloat16."""
    num_first_layers_in_bf16: NonNegativeInt = 0
    """With precision: fp8 so many first layers stay bfloat16."""
    num_last_layers_in_bf16: NonNegativeInt = 0
    """With precision: fp8 so many last layers stay bfloat16."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    """Number format of the key-value cache; auto is that of the activations. Its scales are vLLM's own."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that cut each layer of one engine; with the stages they may be those of several machines."""
    pipeline_parallel_size: PositiveInt = 1
    """Stages of one engine, each with its share of the layers."""
    expert_parallel_size: PositiveInt = 1
    """GPUs of a stage that share whole experts: 1 cuts each expert as other layers, or tensor_parallel_size."""
    gpu_memory_utilization: Annotated[Float, Field(gt=0, le=1)] = 0.6
    """Share of a GPU's memory for weights, activations and key-value cache; not read on CPU."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """Size of the key-value cache (ours); null is what the share leaves or, on CPU, room for 64 sequences."""
    max_model_len: PositiveInt | None = None
    """Longest sequence; null is policy.max_total_sequence_length."""
    max_num_seqs: PositiveInt = 256
    """Sequences that are decoded together at most (ours)."""
    enforce_eager: bool = False
    """Never capture CUDA graphs; nothing is captured or compiled on CPU."""
    cpu_engines: PositiveInt = 1
    """Engines when cluster.gpus_per_node is 0 (ours); each answers a share of the samples."""

    @property
    def processes(self) -> int:
        """Return how many processes one engine has, each with a GPU where there are some."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def required_for_groups(self) -> str | None:
        """See `EngineConfig.required_for_groups`."""
        return None if self.async_engine else "vllm_cfg.async_engine"

    def number_format(self, of_training: str) -> str | None:
        """See `EngineConfig.number_format`."""
        return "bfloat16" if self.precision == "fp8" else self.precision or of_training

    @property
    def rounds(self) -> bool:
        """Return whether its answers are of other numbers than the weights that it is sent."""
        return self.precision == "fp8" or self.kv_cache_dtype != "auto"

    def problems(self) -> Iterator[Problem]:
        """Yield keys of quantization where nothing is quantized."""
        if self.precision == "fp8":
            return
        for key in _OF_FP8:
            if given := getattr(self, key):
                yield has_no_effect(key, given, "without precision: fp8", "precision")


_OF_FP8 = ("is_mx", "quantization_ignored_layer_kws", "num_first_layers_in_bf16", "num_last_layers_in_bf16")


class ColocatedResourcesConfig(StrictModel):
    """GPUs that engines of their own get, on top of those of the training ranks in the section cluster."""

    gpus_per_node: PositiveInt | None = None
    """GPUs on each machine."""
    num_nodes: PositiveInt | None = None
    """Machines; null is one."""


class ColocatedConfig(StrictModel):
    """Whether generation shares what the training ranks have: their GPUs (vllm), or the ranks themselves (embedded).

    vLLM engines on CPU are processes of their own either way. On shared GPUs the ranks' memory holds what it held while
    engines generate.
    """

    enabled: bool = True
    """vLLM engines sleep while the ranks train, embedded ones are the ranks; false makes engines beside the ranks."""
    resources: ColocatedResourcesConfig = ColocatedResourcesConfig()
    """The engines' own GPUs where enabled is false."""

    def problems(self) -> Iterator[Problem]:
        """Yield resources that nothing reads."""
        if self.enabled and (self.resources.gpus_per_node or self.resources.num_nodes):
            yield Problem(
                "incompatible",
                "resources",
                "engines that share the ranks' GPUs have none of their own, and enabled is true",
                "remove it, or set enabled: false",
                ("enabled",),
            )


class MismatchConfig(StrictModel):
    """What happens when training finds other log-probabilities for a response than the engine reported (ours).

    The measure of a response is the mean of exp|generation - training| over its tokens: 1 is perfect agreement.
    """

    threshold: Annotated[Float, Field(gt=1)] | None = None
    """Measure above which a response counts as mismatched; null only reports."""
    action: Literal["warn", "mask", "stop"] = "warn"
    """Say so, leave the response out of the loss, or end the run before it trains."""
