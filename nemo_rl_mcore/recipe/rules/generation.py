"""Rules for engines with a policy and on machines, and for offloading next to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl_mcore.config.base import Rule, Rules, either
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.models import missing_family

if TYPE_CHECKING:
    from nemo_rl_mcore.config.run_config import RunConfig

SMALLEST_CPU_HEAD = 32
"""Smallest head size for which vLLM has an attention kernel on CPUs."""
_BACKEND, _GPUS = "policy.generation.backend", "cluster.gpus_per_node"
_COLOCATED = "policy.generation.colocated.enabled"
_RESOURCES = "policy.generation.colocated.resources"
_VLLM = "policy.generation.vllm_cfg"
_OF_VLLM, _ROUNDING = "generation.vllm_cfg", ("precision", "kv_cache_dtype")
_TRANSPORT, _OFFLOAD = "policy.generation.refit_transport", "policy.offload"


def _vllm(policy: PolicyConfig) -> bool:
    return policy.generation.backend == "vllm"


def _vllm_on_cpu(config: RunConfig) -> bool:
    return _vllm(config.policy) and config.cluster.on_cpu


def _rounded_by(policy: PolicyConfig) -> str | None:
    """Return the key that makes an engine store numbers with less precision than it receives; None if none does."""
    vllm = policy.generation.vllm_cfg
    if not _vllm(policy) or not (vllm.quantizes or vllm.kv_cache_dtype != "auto"):
        return None
    return "precision" if vllm.quantizes else "kv_cache_dtype"


def _heads_on_cpu(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    model, weights = config.policy.model, config.policy.weights
    own_size = f"set kv_channels: {SMALLEST_CPU_HEAD}, use fewer heads, or set backend: embedded"
    yield Rule(
        "too-small",
        f"policy.model.{'kv_channels' if model.kv_channels else 'num_attention_heads'}",
        _vllm_on_cpu(config) and model.shape.head_dim < SMALLEST_CPU_HEAD,
        ("policy.model", _BACKEND, _GPUS),
        "set backend: embedded" if weights else own_size,
        says=f"the head size {model.shape.head_dim} is below {SMALLEST_CPU_HEAD}, vLLM's minimum on CPU",
    )


def _engine_layout(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield rules for engines that neither share a machine evenly nor span whole machines, or leave GPUs unused."""
    cluster, resources = config.cluster, config.policy.generation.colocated.resources
    vllm = config.policy.generation.vllm_cfg
    if not _vllm(config.policy):
        return
    if cluster.on_cpu:
        source, per_node, nodes = "cluster.cpu_workers_per_node", cluster.workers_per_node, cluster.num_nodes
    elif config.policy.generation.colocated.enabled:
        source, per_node, nodes = _GPUS, cluster.gpus_per_node, cluster.num_nodes
    else:
        source = f"{_RESOURCES}.gpus_per_node"
        per_node, nodes = resources.gpus_per_node, resources.num_nodes or 1
    if per_node is None:
        fix, why = f"set {source}, or enabled: true", "separate engines need their own GPUs"
        yield Rule("requires", _COLOCATED, True, (_RESOURCES,), fix, why)
        return
    size, path, whole = vllm.processes, f"{_VLLM}.tensor_parallel_size", per_node * nodes
    related = (source, f"{source.rpartition('.')[0]}.num_nodes")
    stages = (f"{_VLLM}.pipeline_parallel_size",) if vllm.pipeline_parallel_size > 1 else ()
    why = f"an engine has {size} processes, tensor_parallel_size x pipeline_parallel_size"
    if per_node % size and size % per_node:
        fix = f"make the number of processes a divisor or a multiple of {per_node}"
        yield Rule("not-divisible", path, True, (related[0], *stages), fix, why)
    elif whole % size:
        fix = f"make the number of devices ({whole}) a multiple of {size}"
        yield Rule("not-divisible", path, True, (*related, *stages), fix, why)


def _embedded_apart(config: RunConfig) -> bool:
    generation = config.policy.generation
    return generation.backend == "embedded" and not generation.colocated.enabled


def _embedded_engines(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield rules for the GPUs of separate embedded engines."""
    policy, resources = config.policy, config.policy.generation.colocated.resources
    if not _embedded_apart(config) or config.cluster.on_cpu:
        return
    nodes, per_node = resources.num_nodes or 1, resources.gpus_per_node
    yield Rule(
        "missing",
        f"{_RESOURCES}.num_nodes",
        per_node is None and nodes > 1,
        (f"{_RESOURCES}.gpus_per_node",),
        "set gpus_per_node, or remove num_nodes",
        says=f"{nodes} needs gpus_per_node, the engines' GPUs on each machine",
    )
    gpus = (per_node or 0) * nodes
    yield Rule(
        "contradicts",
        "policy.generation.engines",
        per_node is not None and gpus != policy.generation.engines,
        (_RESOURCES,),
        f"set it to {gpus}, or remove the section resources",
        f"each GPU holds one engine, so there are {gpus}",
    )


def _offloads(config: RunConfig, *, beside: bool) -> bool:
    """Return True if ranks offload everything; beside: true for engines that take turns with the ranks."""
    turns = config.policy.generation.takes_turns
    return config.policy.offload == "all" and turns == beside and not config.asynchronous


_REPLAY = "router_replay.enabled"

ENGINE_RULES: Rules[PolicyConfig] = (
    # As in vLLM, VllmConfig._verify_aux_output_compatibility.
    either(
        "not-supported",
        {_REPLAY: False, f"{_OF_VLLM}.pipeline_parallel_size": 1},
        "vLLM returns no routes from pipeline stages",
        where=_vllm,
    ),
    Rule(
        "not-supported",
        f"{_OF_VLLM}.expert_parallel_size",
        lambda own: (
            _vllm(own)
            and own.generation.vllm_cfg.expert_parallel_size
            not in (1, own.generation.vllm_cfg.tensor_parallel_size)
        ),
        (f"{_OF_VLLM}.tensor_parallel_size",),
        "set it to tensor_parallel_size, or to 1",
        "experts are sharded over the tensor-parallel GPUs",
    ),
    Rule(
        "has-no-effect",
        f"{_OF_VLLM}.expert_parallel_size",
        lambda own: (
            _vllm(own)
            and own.model_name is None
            and own.model.num_moe_experts is None
            and own.generation.vllm_cfg.expert_parallel_size
            == own.generation.vllm_cfg.tensor_parallel_size
            > 1
        ),
        ("model.num_moe_experts",),
    ),
    Rule(
        "too-large",
        f"{_OF_VLLM}.pipeline_parallel_size",
        lambda own: (
            _vllm(own)
            and own.model_name is None
            and own.generation.vllm_cfg.pipeline_parallel_size > own.model.num_layers
        ),
        ("model.num_layers",),
    ),
    Rule(
        "requires",
        f"{_OF_VLLM}.precision",
        lambda own: _rounded_by(own) == "precision" and own.precision != "bfloat16",
        ("precision",),
        {"precision": "bfloat16"},
    ),
    Rule(
        "incompatible",
        "generation.verify_refit",
        lambda own: _rounded_by(own) == "precision" and own.generation.verify_refit,
        (f"{_OF_VLLM}.precision",),
        "set it to false to compare only names",
        "the engine rounds the weights, so digests would differ",
    ),
    *(
        Rule[PolicyConfig](
            "incompatible",
            "generation.compare_at_start",
            lambda own, key=key: _rounded_by(own) == key and own.generation.compare_at_start,
            (f"{_OF_VLLM}.{key}",),
            "set it to false; each step still reports the mismatch",
            "no bounds have been measured for this format",
        )
        for key in _ROUNDING
    ),
    Rule(
        "not-supported",
        "generation.backend",
        lambda own: _vllm(own) and own.model_name is None and missing_family(own.model),
        ("model",),
        {"generation.backend": "embedded"},
        lambda own: missing_family(own.model),
    ),
)
RUN_RULES: Rules[RunConfig] = (
    Rule(
        "requires",
        _TRANSPORT,
        lambda run: (
            run.cluster.on_cpu
            and not run.policy.generation.decodes_on_ranks
            and run.policy.generation.refit_transport in ("cuda_ipc", "nccl")
        ),
        (_BACKEND, _GPUS),
        "set it to null, which selects shared_memory on one machine",
    ),
    Rule(
        "incompatible",
        _TRANSPORT,
        lambda run: (
            not run.policy.generation.decodes_on_ranks
            and run.policy.generation.refit_transport == "shared_memory"
            and run.cluster.num_nodes > 1
        ),
        (_BACKEND, "cluster.num_nodes"),
        {_TRANSPORT: None},
        "memory is shared within one machine only",
    ),
    Rule(
        "requires",
        _TRANSPORT,
        lambda run: (
            not run.policy.generation.decodes_on_ranks
            and not run.cluster.on_cpu
            and not run.policy.generation.colocated.enabled
            and run.policy.generation.refit_transport == "cuda_ipc"
        ),
        (_COLOCATED,),
        "set it to null, which selects nccl",
        "it needs engines on the ranks' GPUs",
    ),
    _heads_on_cpu,
    Rule(
        "not-supported",
        _BACKEND,
        lambda run: _vllm_on_cpu(run) and run.policy.model.num_moe_experts is not None,
        ("policy.model.num_moe_experts", _GPUS),
        "set backend: embedded, or run on GPUs",
        "on CPU vLLM packs experts at its start and cannot update them",
    ),
    *(
        Rule["RunConfig"](
            "requires",
            f"{_VLLM}.{key}",
            lambda run, key=key: run.cluster.on_cpu and _rounded_by(run.policy) == key,
            (_BACKEND, _GPUS),
            "remove it, or run on GPUs",
        )
        for key in _ROUNDING
    ),
    Rule(
        "not-supported",
        _BACKEND,
        lambda run: _vllm_on_cpu(run) and run.policy.model.shape.has_mamba,
        ("policy.model.hybrid_layer_pattern", _GPUS),
        "set backend: embedded, or run on GPUs",
        "vLLM has no CPU kernels for Mamba layers",
    ),
    Rule(
        "not-supported",
        _BACKEND,
        lambda run: _vllm_on_cpu(run) and run.policy.model.linear_attention_freq,
        ("policy.model.linear_attention_freq", _GPUS),
        "set backend: embedded, or run on GPUs",
        "not tested with gated delta nets on CPU",
    ),
    _engine_layout,
    Rule(
        "not-supported",
        _COLOCATED,
        lambda run: (
            _embedded_apart(run) and run.policy.model_name is None and missing_family(run.policy.model)
        ),
        ("policy.model", _BACKEND),
        # An asynchronous run would send whoever sets it to true back to false.
        lambda run: (
            ("" if run.policy.weights else "change policy.model, or ")
            + (f"set {run.key('asynchrony')}.enabled: false and " if run.asynchronous else "set ")
            + "colocated.enabled: true"
        ),
        lambda run: missing_family(run.policy.model),
    ),
    _embedded_engines,
    Rule(
        "incompatible",
        _OFFLOAD,
        lambda run: run.policy.offload != "none" and run.asynchronous,
        ("asynchrony.enabled",),
        {_OFFLOAD: "none"},
        "engines have their own devices, and gradients must stay between the chunks of a step",
    ),
    Rule(
        "incompatible",
        _OFFLOAD,
        lambda run: (
            run.policy.offload != "none" and run.algorithm == "sft" and not run.policy.generation.takes_turns
        ),
        (_BACKEND, _COLOCATED),
        {_OFFLOAD: "none"},
        "sft has no phase without gradients and optimizer",
    ),
    Rule(
        "incompatible",
        _OFFLOAD,
        lambda run: _offloads(run, beside=False),
        (_BACKEND, _COLOCATED),
        "set it to grads_optimizer, or policy.generation.backend: vllm with colocated.enabled: true",
        "no engine shares the ranks' devices",
    ),
    either(
        "incompatible",
        {_OFFLOAD: "grads_optimizer", "policy.generation.compare_at_start": False},
        "the comparison needs the ranks' weights in memory together with the engines' caches",
        where=lambda run: _offloads(run, beside=True),
    ),
    either(
        "incompatible",
        {_OFFLOAD: "grads_optimizer", "policy.generation.max_restarts": 0},
        "weights would be sent to a restarted engine while other engines' caches occupy the GPUs",
        where=lambda run: _offloads(run, beside=True),
    ),
    Rule(
        "incompatible",
        _OFFLOAD,
        lambda run: (
            run.policy.offload != "none" and run.algorithm == "ppo" and run.policy.generation.takes_turns
        ),
        (_BACKEND, _COLOCATED),
        {_OFFLOAD: "none", _COLOCATED: False},
        "the critic trains last, and would keep its gradients and optimizer on the device during generation",
    ),
)
