"""Configuration of the vLLM engine."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from nemo_rl_mcore.config.base import Float, PositiveInt, Problem, StrictModel
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
    precision: Literal["float32", "bfloat16"] | None = None
    """Number format of weights and activations; null is policy.precision."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs of one engine."""
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
    def required_for_groups(self) -> str | None:
        """See `EngineConfig.required_for_groups`."""
        return None if self.async_engine else "vllm_cfg.async_engine"

    def number_format(self, of_training: str) -> str | None:
        """See `EngineConfig.number_format`."""
        return self.precision or of_training


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
