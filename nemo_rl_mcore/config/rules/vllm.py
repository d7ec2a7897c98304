"""What vLLM's engines cannot do, with a policy and on machines."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.families import missing_family
from nemo_rl_mcore.config.master import RunConfig
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.rules.feature import Rules
from nemo_rl_mcore.config.vllm import VllmConfig

SMALLEST_CPU_HEAD = 32
"""Size of a head below which vLLM's attention on CPU has no kernel."""


def _policy(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield what the engine cannot do with this policy, on any device."""
    vllm = policy.generation.engine
    if not isinstance(vllm, VllmConfig):
        return
    longest = vllm.max_model_len
    if longest is not None and longest < policy.max_total_sequence_length:
        yield Problem(
            "too-small",
            "generation.vllm_cfg.max_model_len",
            f"{longest} is below policy.max_total_sequence_length: {policy.max_total_sequence_length}",
            "set it to null, or raise it",
            ("max_total_sequence_length",),
        )
    # Of weights that are named, the key that names them is told.
    if policy.model_name is None and (reason := missing_family(policy.model)):
        yield Problem(
            "not-supported", "generation.backend", f"vllm: {reason}", "set backend: embedded", ("model",)
        )


def _machines(config: RunConfig) -> Iterator[Problem]:
    """Yield what the engine cannot do on these machines."""
    if not isinstance(config.policy.generation.engine, VllmConfig):
        return
    yield from _cpu_problems(config) if config.cluster.on_cpu else _gpu_problems(config)


def _cpu_problems(config: RunConfig) -> Iterator[Problem]:
    model, generation = config.policy.model, config.policy.generation
    related = ("policy.generation.backend", "cluster.gpus_per_node")
    if model.head_dim < SMALLEST_CPU_HEAD:
        yield Problem(
            "too-small",
            "policy.model.kv_channels" if model.kv_channels else "policy.model.num_attention_heads",
            f"the head size {model.head_dim} is below {SMALLEST_CPU_HEAD}, the smallest of vLLM on CPU "
            "(policy.generation.backend: vllm, cluster.gpus_per_node: 0)",
            "set backend: embedded"
            if config.policy.weights
            else f"set kv_channels: {SMALLEST_CPU_HEAD}, use fewer heads, or set backend: embedded",
            ("policy.model", *related),
        )
    if model.num_moe_experts is not None:
        yield Problem(
            "not-supported",
            "policy.generation.backend",
            "vllm cannot take new weights for experts on CPU, where it packs them when it starts",
            "set backend: embedded, or run on GPUs",
            ("policy.model.num_moe_experts", "cluster.gpus_per_node"),
        )
    if model.has_mamba:
        yield Problem(
            "not-supported",
            "policy.generation.backend",
            "vllm has no kernels for Mamba layers on CPU",
            "set backend: embedded, or run on GPUs",
            ("policy.model.hybrid_layer_pattern", "cluster.gpus_per_node"),
        )
    if generation.vllm_cfg.tensor_parallel_size > 1:
        yield Problem(
            "requires",
            "policy.generation.vllm_cfg.tensor_parallel_size",
            f"{generation.vllm_cfg.tensor_parallel_size} needs GPUs, and cluster.gpus_per_node is 0",
            "set it to 1; cpu_engines adds engines",
            related,
        )


def _gpu_problems(config: RunConfig) -> Iterator[Problem]:
    generation, cluster = config.policy.generation, config.cluster
    size = generation.vllm_cfg.tensor_parallel_size
    shared, resources = generation.colocated.enabled, generation.colocated.resources
    available = cluster.gpus_per_node if shared else resources.gpus_per_node
    source = "cluster" if shared else "policy.generation.colocated.resources"
    if available is None:
        yield Problem(
            "requires",
            "policy.generation.colocated.enabled",
            "false needs GPUs of the engines' own, and resources.gpus_per_node is null",
            "set policy.generation.colocated.resources.gpus_per_node, or enabled: true",
            ("policy.generation.colocated.resources",),
        )
    elif available % size:
        yield Problem(
            "not-divisible",
            "policy.generation.vllm_cfg.tensor_parallel_size",
            f"{size} does not divide {source}.gpus_per_node: {available}",
            "make it a divisor",
            (f"{source}.gpus_per_node",),
        )


RULES = Rules(of_policies=(_policy,), of_runs=(_machines,))
