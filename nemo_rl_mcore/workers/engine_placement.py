"""Place the engines of a run: separate processes on CPU, on the ranks' GPUs, or on separate GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.config.generation import GenerationConfig
from nemo_rl_mcore.config.vllm import ColocatedConfig
from nemo_rl_mcore.generation.engine import EngineKind
from nemo_rl_mcore.workers.cluster import RayCluster
from nemo_rl_mcore.workers.environment import rank_environment
from nemo_rl_mcore.workers.placement import Placement, RankSlot

_CPU_SHARE_OF_AN_ENGINE = 0.1


def place_engines(
    cluster: RayCluster,
    kind: EngineKind,
    colocated: ColocatedConfig,
    ranks: Placement,
    rank_gpus: Sequence[str],
) -> Placement:
    """Return a slot for each engine; `rank_gpus` are the GPUs of the training ranks, by rank, and empty on CPU."""
    on_cpu = cluster.config.on_cpu
    environment = {**rank_environment(os.environ, on_cpu=on_cpu), **kind.environment}
    if on_cpu:
        return _on_cpu(cluster, environment | cluster.local_network(), kind.engines)
    if colocated.enabled:
        return _next_to_ranks(cluster.config, environment, kind.gpus, ranks, rank_gpus)
    return _apart(cluster, environment, kind, colocated)


def transport_of(cluster: RayCluster, generation: GenerationConfig) -> str:
    """Return the transport that is asked for, or the fastest one there is."""
    if generation.refit_transport is not None:
        return generation.refit_transport
    if cluster.config.on_cpu:
        return "shared_memory" if cluster.one_machine else "ray"
    return "cuda_ipc" if generation.colocated.enabled else "nccl"


def _on_cpu(cluster: RayCluster, environment: Mapping[str, str], engines: int) -> Placement:
    options: dict[str, Any] = {"num_cpus": _CPU_SHARE_OF_AN_ENGINE, "num_gpus": 0}
    if not cluster.one_machine:
        options["scheduling_strategy"] = "SPREAD"  # one that starts anew may find its machine gone
    return Placement(tuple(RankSlot(engine, environment, options) for engine in range(engines)))


def _next_to_ranks(
    cluster: ClusterConfig,
    environment: Mapping[str, str],
    size: int,
    ranks: Placement,
    rank_gpus: Sequence[str],
) -> Placement:
    """Return each engine on the GPUs of `size` consecutive ranks of one machine, which Ray has given to the ranks."""
    assert ranks.group is not None  # ranks on GPUs have one
    slots: list[RankSlot] = []
    for engine, first in enumerate(range(0, len(rank_gpus), size)):
        node = first // cluster.workers_per_node
        strategy = PlacementGroupSchedulingStrategy(ranks.group, placement_group_bundle_index=node)
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(rank_gpus[first : first + size])}
        options = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": strategy}
        slots.append(RankSlot(engine, {**environment, **gpus}, options))
    return Placement(tuple(slots))


def _apart(
    cluster: RayCluster, environment: Mapping[str, str], kind: EngineKind, colocated: ColocatedConfig
) -> Placement:
    """Return each engine on GPUs that Ray reserves for it."""
    resources, size = colocated.resources, kind.gpus
    per_node = resources.gpus_per_node or size * kind.engines
    group = cluster.reserve_gpus(per_node, resources.num_nodes or 1)
    slots: list[RankSlot] = []
    for engine in range(per_node * (resources.num_nodes or 1) // size):
        node = engine * size // per_node
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        options = {"num_cpus": 1, "num_gpus": size, "scheduling_strategy": strategy}
        slots.append(RankSlot(engine, environment, options))
    return Placement(tuple(slots), group)
