"""Configuration of the vLLM engine, and what it cannot do."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from nemo_rl_mcore.config.base import (
    Float,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    StrictModel,
)
from nemo_rl_mcore.config.hf_config import missing_family

if TYPE_CHECKING:
    from nemo_rl_mcore.config.master import RunConfig
    from nemo_rl_mcore.config.policy import PolicyConfig

SMALLEST_CPU_HEAD = 32
"""Size of a head below which vLLM's attention on CPU has no kernel."""
_BYTES = {"float32": 4, "bfloat16": 2}
_DEFAULT_BUCKET_BYTES = 64 << 20
_CPU_CACHE_SEQUENCES = 64
"""Sequences of full length that the key-value cache on CPU has room for by default; more wait their turn."""


class VllmConfig(StrictModel):
    """The vLLM engines; read when policy.generation.backend is vllm."""

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
    max_restarts: NonNegativeInt = 0
    """Times in a run that engines which died are started anew, given their weights, and asked again (ours)."""
    start_timeout_s: PositiveFloat = 600.0
    """Deadline of an engine's start (ours)."""
    call_timeout_s: PositiveFloat = 1800.0
    """Deadline of a batch, and of an engine's acknowledgement of a bucket of weights (ours)."""


class ColocatedResourcesConfig(StrictModel):
    """GPUs that engines of their own get, on top of those of the training ranks in the section cluster."""

    gpus_per_node: PositiveInt | None = None
    """GPUs on each machine."""
    num_nodes: PositiveInt | None = None
    """Machines; null is one."""


class ColocatedConfig(StrictModel):
    """Whether the engines share the GPUs of the training ranks; on CPU they are processes of their own either way."""

    enabled: bool = True
    """Engines sleep while the ranks train, and the ranks' memory holds what it held while engines generate."""
    resources: ColocatedResourcesConfig = ColocatedResourcesConfig()
    """The engines' own GPUs where enabled is false."""

    def problems(self) -> Iterator[Problem]:
        """Yield resources that nothing reads."""
        if self.enabled and (self.resources.gpus_per_node or self.resources.num_nodes):
            yield Problem(
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


def vllm_policy_problems(policy: "PolicyConfig") -> Iterator[Problem]:
    """Yield what the engine cannot do with this policy, on any device."""
    generation = policy.generation
    for key, value, neutral in (("top_p", generation.top_p, 1.0), ("top_k", generation.top_k, None)):
        if value != neutral:
            yield Problem(
                f"generation.{key}",
                f"{value} does not go with generation.backend: vllm, whose log-probabilities are those after the "
                "filter while training computes them before it",
                f"set {key}: {'null' if neutral is None else neutral}, or backend: embedded",
                ("generation.backend",),
            )
    longest = generation.vllm_cfg.max_model_len
    if longest is not None and longest < policy.max_total_sequence_length:
        yield Problem(
            "generation.vllm_cfg.max_model_len",
            f"{longest} is below policy.max_total_sequence_length: {policy.max_total_sequence_length}",
            "set it to null, or raise it",
            ("max_total_sequence_length",),
        )
    if reason := missing_family(policy.model):
        yield Problem("generation.backend", f"vllm: {reason}", "set backend: embedded", ("model",))
    given = generation.refit_bucket_bytes
    if given is not None and given < largest_weight_bytes(policy):
        yield Problem(
            "generation.refit_bucket_bytes",
            f"{given} is below the {largest_weight_bytes(policy)} bytes of the largest weight",
            "set it to null, or raise it",
            ("model",),
        )


def vllm_problems(config: "RunConfig") -> Iterator[Problem]:
    """Yield what the engine cannot do on these machines."""
    if config.policy.generation.backend != "vllm":
        return
    yield from _cpu_problems(config) if config.cluster.on_cpu else _gpu_problems(config)


def _cpu_problems(config: "RunConfig") -> Iterator[Problem]:
    model, generation = config.policy.model, config.policy.generation
    related = ("policy.generation.backend", "cluster.gpus_per_node")
    if model.head_dim < SMALLEST_CPU_HEAD:
        yield Problem(
            "policy.model.kv_channels" if model.kv_channels else "policy.model.num_attention_heads",
            f"the head size {model.head_dim} is below {SMALLEST_CPU_HEAD}, the smallest of vLLM on CPU "
            "(policy.generation.backend: vllm, cluster.gpus_per_node: 0)",
            f"set kv_channels: {SMALLEST_CPU_HEAD}, use fewer heads, or set backend: embedded",
            ("policy.model", *related),
        )
    if model.num_moe_experts is not None:
        yield Problem(
            "policy.generation.backend",
            "vllm cannot take new weights for experts (family qwen3_moe) on CPU, where it packs them when it starts",
            "set backend: embedded, or run on GPUs",
            ("policy.model.num_moe_experts", "cluster.gpus_per_node"),
        )
    if generation.vllm_cfg.tensor_parallel_size > 1:
        yield Problem(
            "policy.generation.vllm_cfg.tensor_parallel_size",
            f"{generation.vllm_cfg.tensor_parallel_size} needs GPUs, and cluster.gpus_per_node is 0",
            "set it to 1; cpu_engines adds engines",
            related,
        )
    if generation.refit_transport in ("cuda_ipc", "nccl"):
        yield Problem(
            "policy.generation.refit_transport",
            f"{generation.refit_transport} needs GPUs, and cluster.gpus_per_node is 0",
            "set it to null: shared_memory on one machine",
            related,
        )


def _gpu_problems(config: "RunConfig") -> Iterator[Problem]:
    generation, cluster = config.policy.generation, config.cluster
    size = generation.vllm_cfg.tensor_parallel_size
    shared, resources = generation.colocated.enabled, generation.colocated.resources
    available = cluster.gpus_per_node if shared else resources.gpus_per_node
    source = "cluster" if shared else "policy.generation.colocated.resources"
    if available is None:
        yield Problem(
            "policy.generation.colocated.enabled",
            "false needs GPUs of the engines' own, and resources.gpus_per_node is null",
            "set policy.generation.colocated.resources.gpus_per_node, or enabled: true",
            ("policy.generation.colocated.resources",),
        )
    elif available % size:
        yield Problem(
            "policy.generation.vllm_cfg.tensor_parallel_size",
            f"{size} does not divide {source}.gpus_per_node: {available}",
            "make it a divisor",
            (f"{source}.gpus_per_node",),
        )
    if generation.refit_transport == "cuda_ipc" and not shared:
        yield Problem(
            "policy.generation.refit_transport",
            "cuda_ipc needs engines on the ranks' GPUs, and colocated.enabled is false",
            "set it to null: nccl",
            ("policy.generation.colocated.enabled",),
        )


def largest_weight_bytes(policy: "PolicyConfig") -> int:
    """Bytes of the largest tensor that a refit sends."""
    model = policy.model
    rows = max(model.vocab_size, model.ffn_size, model.num_attention_heads * model.head_dim)
    return rows * model.hidden_size * _BYTES[policy.precision]


def refit_bucket_bytes(policy: "PolicyConfig") -> int:
    """Size of a bucket: what is asked for, or 64 MiB, and in any case the largest tensor."""
    return max(policy.generation.refit_bucket_bytes or _DEFAULT_BUCKET_BYTES, largest_weight_bytes(policy))


def cpu_cache_bytes(policy: "PolicyConfig") -> int:
    """Size of the key-value cache on CPU."""
    vllm, model = policy.generation.vllm_cfg, policy.model
    if vllm.kv_cache_memory_bytes is not None:
        return vllm.kv_cache_memory_bytes
    block = 128  # tokens; the cache is cut into whole blocks
    length = -(-(vllm.max_model_len or policy.max_total_sequence_length) // block) * block
    token = (
        2
        * model.num_layers
        * model.query_groups
        * model.head_dim
        * _BYTES[vllm.precision or policy.precision]
    )
    return _CPU_CACHE_SEQUENCES * length * token
