"""What vLLM's engines cannot do, with a policy and on machines."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem, has_no_effect
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.vllm import VllmConfig
from nemo_rl_mcore.models import missing_family
from nemo_rl_mcore.recipe.rules.feature import Rules

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
    yield from _cut_problems(policy, vllm)
    yield from _rounding_problems(policy, vllm)
    # Of weights that are named, the key that names them is told.
    if policy.model_name is None and (reason := missing_family(policy.model)):
        yield Problem(
            "not-supported", "generation.backend", f"vllm: {reason}", "set backend: embedded", ("model",)
        )


def _rounding_problems(policy: PolicyConfig, vllm: VllmConfig) -> Iterator[Problem]:
    """Yield comparisons of an engine with weights that it holds in fewer digits than it is sent."""
    if not vllm.rounds:
        return
    source = "precision" if vllm.precision == "fp8" else "kv_cache_dtype"
    path = f"generation.vllm_cfg.{source}"
    given = f"{source}: {getattr(vllm, source)}"
    if vllm.precision == "fp8" and policy.precision != "bfloat16":
        yield Problem(
            "requires", path, "fp8 needs policy.precision: bfloat16", "set it to bfloat16", ("precision",)
        )
    if vllm.precision == "fp8" and policy.generation.verify_refit:
        yield Problem(
            "incompatible",
            "generation.verify_refit",
            f"true compares bits, and with policy.{path}: fp8 the engine holds others than it is sent",
            "set it to false: names alone are compared",
            (path,),
        )
    if policy.generation.compare_at_start:
        yield Problem(
            "incompatible",
            "generation.compare_at_start",
            f"true has no bounds for vllm_cfg.{given}, which nobody has measured",
            "set it to false: each step measures the mismatch",
            (path,),
        )


def _cut_problems(policy: PolicyConfig, vllm: VllmConfig) -> Iterator[Problem]:
    """Yield parts that the model cannot be cut into."""
    tensor, experts, stages = (
        vllm.tensor_parallel_size,
        vllm.expert_parallel_size,
        vllm.pipeline_parallel_size,
    )
    path = "generation.vllm_cfg.expert_parallel_size"
    if experts not in (1, tensor):
        yield Problem(
            "not-supported",
            path,
            f"{experts} is not tensor_parallel_size: {tensor}; experts are shared by the GPUs that "
            "cut the other layers, and by no other engine",
            "set it to tensor_parallel_size, or to 1",
            ("generation.vllm_cfg.tensor_parallel_size",),
        )
    elif experts > 1 and policy.model.num_moe_experts is None and policy.model_name is None:
        yield has_no_effect(path, experts, "on a model without experts", "model.num_moe_experts")
    if stages > policy.model.num_layers and policy.model_name is None:
        yield Problem(
            "too-large",
            "generation.vllm_cfg.pipeline_parallel_size",
            f"{stages} is above policy.model.num_layers: {policy.model.num_layers}",
            "lower it",
            ("model.num_layers",),
        )


def _machines(config: RunConfig) -> Iterator[Problem]:
    """Yield what the engine cannot do on these machines."""
    if not isinstance(config.policy.generation.engine, VllmConfig):
        return
    if config.cluster.on_cpu:
        yield from _cpu_problems(config)
    yield from _layout_problems(config)


def _cpu_problems(config: RunConfig) -> Iterator[Problem]:
    model = config.policy.model
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
    if config.policy.generation.vllm_cfg.rounds:
        path = "policy.generation.vllm_cfg"
        vllm = config.policy.generation.vllm_cfg
        yield Problem(
            "requires",
            f"{path}.precision" if vllm.precision == "fp8" else f"{path}.kv_cache_dtype",
            "fp8 needs GPUs, and cluster.gpus_per_node is 0",
            "leave it out, or run on GPUs",
            related,
        )
    if model.has_mamba:
        yield Problem(
            "not-supported",
            "policy.generation.backend",
            "vllm has no kernels for Mamba layers on CPU",
            "set backend: embedded, or run on GPUs",
            ("policy.model.hybrid_layer_pattern", "cluster.gpus_per_node"),
        )


def _layout_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield engines that neither share a machine nor have some of their own, whole ones, or leave some over."""
    generation, cluster = config.policy.generation, config.cluster
    vllm, resources = generation.vllm_cfg, generation.colocated.resources
    if cluster.on_cpu:
        source, per_node, nodes = "cluster.cpu_workers_per_node", cluster.workers_per_node, cluster.num_nodes
    elif generation.colocated.enabled:
        source, per_node, nodes = "cluster.gpus_per_node", cluster.gpus_per_node, cluster.num_nodes
    else:
        source = "policy.generation.colocated.resources.gpus_per_node"
        per_node, nodes = resources.gpus_per_node, resources.num_nodes or 1
    if per_node is None:
        yield Problem(
            "requires",
            "policy.generation.colocated.enabled",
            "false needs GPUs of the engines' own, and resources.gpus_per_node is null",
            "set policy.generation.colocated.resources.gpus_per_node, or enabled: true",
            ("policy.generation.colocated.resources",),
        )
        return
    size, of_machines = vllm.processes, source.rpartition(".")[0] + ".num_nodes"
    what = f"an engine has {size} processes (tensor_parallel_size x pipeline_parallel_size), and "
    if per_node % size and size % per_node:
        remedy = "make them a divisor or a multiple of it"
        yield _uneven(vllm, f"{what}{source} is {per_node}", remedy, source)
    elif per_node * nodes % size:
        what += f"{source} x {of_machines} is {per_node * nodes}"
        yield _uneven(vllm, what, "make that a multiple", source, of_machines)


def _uneven(vllm: VllmConfig, what: str, remedy: str, *related: str) -> Problem:
    section = "policy.generation.vllm_cfg"
    stages = (f"{section}.pipeline_parallel_size",) if vllm.pipeline_parallel_size > 1 else ()
    return Problem("not-divisible", f"{section}.tensor_parallel_size", what, remedy, (*related, *stages))


RULES = Rules(of_policies=(_policy,), of_runs=(_machines,))
