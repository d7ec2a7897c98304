"""Who answers the prompts of a run, and where; and what an engine of this package needs for it."""

from dataclasses import dataclass

from nemo_rl_mcore.config.engine_sizes import refit_bucket_bytes
from nemo_rl_mcore.config.engines import EmbeddedConfig
from nemo_rl_mcore.config.families import count_parameters
from nemo_rl_mcore.config.master import RunConfig
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.preflight.memory import WEIGHT_BYTES

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
class EnginesPlan:
    """The engines of a run, in words; memory: of each one, where it is embedded and not the ranks."""

    where: str
    memory: EngineMemory | None = None


def plan_engines(config: RunConfig) -> EnginesPlan:
    """Say who answers; an offline run has an engine for its validation at most."""
    generation = config.policy.generation
    if generation.decodes_on_ranks:
        return EnginesPlan("on the training ranks")
    engine = generation.engine
    embedded = isinstance(engine, EmbeddedConfig)
    count = engine.engines if embedded else _vllm_engines(config)
    memory = _engine_memory(config.policy) if embedded else None
    return EnginesPlan(f"{_counted(count, engine.noun)}, {_place(config)}", memory)


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
    return (config.cluster.world_size if colocated.enabled else apart) // vllm.tensor_parallel_size


def _engine_memory(policy: PolicyConfig) -> EngineMemory:
    parameters = count_parameters(policy.model)
    return EngineMemory(
        parameters=parameters,
        weights=parameters * WEIGHT_BYTES[policy.precision],
        buckets=_BUCKETS * refit_bucket_bytes(policy),
    )
