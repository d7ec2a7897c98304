"""Who answers the prompts of a run, and where; and what an engine of this package needs for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_mcore.config.engines import EmbeddedConfig
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.models import count_parameters, layer_slots, outside_of_layers
from nemo_rl_mcore.models.engine_sizes import refit_bucket_bytes
from nemo_rl_mcore.models.memory import WEIGHT_BYTES

_BUCKETS = 2  # one is filled while the other is copied


@dataclass(frozen=True)
class EngineMemory:
    """Bytes that an embedded engine takes, whatever the layout of the ranks: it is one process."""

    parameters: int
    weights: int
    buckets: int

    @property
    def total(self) -> int:
        """Return all of it."""
        return self.weights + self.buckets


@dataclass(frozen=True)
class ShareMemory:
    """The weights of the fullest process of a vLLM engine that has several: how many, and their bytes."""

    parameters: int
    weights: int


@dataclass(frozen=True)
class EnginesPlan:
    """The engines of a run, in words.

    memory: of each one, where it is embedded and not the ranks. share: of a process, where each engine has several.
    """

    where: str
    memory: EngineMemory | None = None
    share: ShareMemory | None = None


def plan_engines(config: RunConfig) -> EnginesPlan:
    """Say who answers; an offline run has an engine for its validation at most."""
    generation = config.policy.generation
    if generation.decodes_on_ranks:
        return EnginesPlan("on the training ranks")
    engine = generation.engine
    embedded = isinstance(engine, EmbeddedConfig)
    count = engine.engines if embedded else _vllm_engines(config)
    if embedded:
        return EnginesPlan(f"{_counted(count, engine.noun)}, {_place(config)}", _engine_memory(config.policy))
    share = share_memory(config.policy) if generation.vllm_cfg.processes > 1 else None
    return EnginesPlan(f"{_counted(count, engine.noun)}{_spread(config)}, {_place(config)}", share=share)


def share_memory(policy: PolicyConfig) -> ShareMemory:
    """Estimate the fullest process of a vLLM engine; what tensor parallelism leaves whole, such as norms, is small."""
    model, vllm = policy.model, policy.generation.vllm_cfg
    outside, stages = outside_of_layers(model), vllm.pipeline_parallel_size
    layers = [sum(slot.count(model) for slot in layer_slots(model, at)) for at in range(model.num_layers)]
    first = outside.embedding.count(model)
    last = sum(slot.count(model) for slot in outside.of(model) if slot is not outside.embedding)
    ends = first + last if stages == 1 else max(first, last)
    parameters = -(-(_fullest(layers, stages) + ends) // vllm.tensor_parallel_size)
    of_each = 1 if vllm.precision == "fp8" else WEIGHT_BYTES[vllm.precision or policy.precision]
    return ShareMemory(parameters, parameters * of_each)


def _fullest(layers: Sequence[int], stages: int) -> int:
    """Return the largest sum of as many layers in a row as the longest of so many stages has."""
    of_stage = -(-len(layers) // stages)
    return max(sum(layers[at : at + of_stage]) for at in range(len(layers) - of_stage + 1))


def _spread(config: RunConfig) -> str:
    """Say of engines that have several processes how many, and on how many machines."""
    generation, cluster = config.policy.generation, config.cluster
    size, resources = generation.vllm_cfg.processes, generation.colocated.resources
    if size == 1:
        return ""
    shared = cluster.on_cpu or generation.colocated.enabled
    per_node = cluster.workers_per_node if shared else resources.gpus_per_node or size
    over = f" on {size // per_node} machines" if size > per_node else ""
    return f" of {size} processes{over} each"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _place(config: RunConfig) -> str:
    if config.cluster.on_cpu:
        return "in processes beside the ranks"
    if config.policy.generation.colocated.enabled:
        return "on the ranks' GPUs in turn with them"
    return "on GPUs beside those of the ranks"


def _vllm_engines(config: RunConfig) -> int:
    vllm, colocated = config.policy.generation.vllm_cfg, config.policy.generation.colocated
    if config.cluster.on_cpu:
        return vllm.cpu_engines
    resources = colocated.resources
    apart = (resources.gpus_per_node or 0) * (resources.num_nodes or 1)
    return (config.cluster.world_size if colocated.enabled else apart) // vllm.processes


def _engine_memory(policy: PolicyConfig) -> EngineMemory:
    parameters = count_parameters(policy.model)
    return EngineMemory(
        parameters=parameters,
        weights=parameters * WEIGHT_BYTES[policy.precision],
        buckets=_BUCKETS * refit_bucket_bytes(policy),
    )
