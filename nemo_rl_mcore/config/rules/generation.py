"""What the generation engine cannot do, and what it is asked for that the model lacks."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.engine_sizes import largest_weight_bytes
from nemo_rl_mcore.config.hf.hf_config import missing_family
from nemo_rl_mcore.config.master import RunConfig
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.rules.feature import Rules

SMALLEST_CPU_HEAD = 32
"""Size of a head below which vLLM's attention on CPU has no kernel."""


def _stop_ids(policy: PolicyConfig) -> Iterator[Problem]:
    vocabulary = policy.model.vocab_size
    foreign = [stop for stop in policy.generation.stop_token_ids or () if not 0 <= stop < vocabulary]
    if foreign:
        yield Problem(
            "too-large",
            "generation.stop_token_ids",
            f"{foreign} is outside 0 to {vocabulary - 1}, the ids of policy.model.vocab_size: {vocabulary}",
            "remove them, or raise vocab_size" if policy.weights is None else "remove them",
            ("model.vocab_size",),
        )


def _vllm_policy(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield what the engine cannot do with this policy, on any device."""
    generation = policy.generation
    if generation.backend != "vllm":
        return
    for key, value, neutral in (("top_p", generation.top_p, 1.0), ("top_k", generation.top_k, None)):
        if value != neutral:
            yield Problem(
                "incompatible",
                f"generation.{key}",
                f"{value} does not go with generation.backend: vllm, whose log-probabilities are those after the "
                "filter while training computes them before it",
                f"set {key}: {'null' if neutral is None else neutral}, or backend: embedded",
                ("generation.backend",),
            )
    longest = generation.vllm_cfg.max_model_len
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


def _buckets(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield a bucket without room for a weight, where weights are sent."""
    given = policy.generation.refit_bucket_bytes
    if not policy.generation.decodes_on_ranks and given is not None and given < largest_weight_bytes(policy):
        yield Problem(
            "too-small",
            "generation.refit_bucket_bytes",
            f"{given} is below the {largest_weight_bytes(policy)} bytes of the largest weight",
            "set it to null, or raise it",
            ("model",),
        )


def _transport(config: RunConfig) -> Iterator[Problem]:
    """Yield a way for weights to travel that these machines lack, where they travel."""
    generation = config.policy.generation
    if generation.decodes_on_ranks:
        return
    if config.cluster.on_cpu and generation.refit_transport in ("cuda_ipc", "nccl"):
        yield Problem(
            "requires",
            "policy.generation.refit_transport",
            f"{generation.refit_transport} needs GPUs, and cluster.gpus_per_node is 0",
            "set it to null: shared_memory on one machine",
            ("policy.generation.backend", "cluster.gpus_per_node"),
        )
    if generation.refit_transport == "shared_memory" and config.cluster.num_nodes > 1:
        yield Problem(
            "incompatible",
            "policy.generation.refit_transport",
            f"shared_memory is that of one machine, and cluster.num_nodes is {config.cluster.num_nodes}",
            "set it to null",
            ("policy.generation.backend", "cluster.num_nodes"),
        )
    apart = not config.cluster.on_cpu and not generation.colocated.enabled
    if apart and generation.refit_transport == "cuda_ipc":
        yield Problem(
            "requires",
            "policy.generation.refit_transport",
            "cuda_ipc needs engines on the ranks' GPUs, and colocated.enabled is false",
            "set it to null: nccl",
            ("policy.generation.colocated.enabled",),
        )


def _embedded_engines(config: RunConfig) -> Iterator[Problem]:
    """Yield what keeps embedded engines of their own from getting weights, or GPUs."""
    policy, resources = config.policy, config.policy.generation.colocated.resources
    if policy.generation.backend != "embedded" or policy.generation.decodes_on_ranks:
        return
    # Of weights that are named, the key that names them is told.
    if policy.model_name is None and (reason := missing_family(policy.model)):
        # An asynchronous run would send whoever sets it to true back to false.
        on_ranks = f"{config.asynchrony_key}.enabled: false and colocated.enabled: true"
        remedy = f"set {on_ranks if config.asynchronous else 'it to true'}"
        yield Problem(
            "not-supported",
            "policy.generation.colocated.enabled",
            f"false sends weights by the names of a family, and {reason}",
            remedy if policy.weights else f"change policy.model, or {remedy}",
            ("policy.model", "policy.generation.backend"),
        )
    engines, nodes = policy.generation.embedded_cfg.engines, resources.num_nodes or 1
    if config.cluster.on_cpu:
        return
    key = "policy.generation.colocated.resources"
    if resources.gpus_per_node is None and nodes > 1:
        yield Problem(
            "missing",
            f"{key}.num_nodes",
            f"{nodes} with gpus_per_node: null does not say how many engines each has",
            "set gpus_per_node, or remove num_nodes",
            (f"{key}.gpus_per_node",),
        )
    elif resources.gpus_per_node is not None and resources.gpus_per_node * nodes != engines:
        gpus = resources.gpus_per_node * nodes
        yield Problem(
            "contradicts",
            "policy.generation.embedded_cfg.engines",
            f"{engines} is not the {gpus} GPUs of {key}, and each engine has one",
            f"set it to {gpus}, or remove the section resources",
            (key,),
        )


def _vllm_machines(config: RunConfig) -> Iterator[Problem]:
    """Yield what the engine cannot do on these machines."""
    if config.policy.generation.backend != "vllm":
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
            "vllm cannot take new weights for experts (family qwen3_moe) on CPU, where it packs them when it starts",
            "set backend: embedded, or run on GPUs",
            ("policy.model.num_moe_experts", "cluster.gpus_per_node"),
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


RULES = Rules(
    of_policies=(_stop_ids, _vllm_policy, _buckets),
    of_runs=(_vllm_machines, _transport, _embedded_engines),
)
