"""Place the engines of a run: separate processes on CPU, on the ranks' GPUs, or on separate GPUs.

An engine has a slot on each machine that it has processes on, the first of which the driver calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_mcore.config.generation import GenerationConfig
from nemo_rl_mcore.config.vllm import ColocatedConfig
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.environment import rank_environment
from nemo_rl_mcore.driver.actors.placement import Placement, RankSlot
from nemo_rl_mcore.engine.engine import EngineKind
from nemo_rl_mcore.engine.machines import Machines

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
        environment |= cluster.local_network()
        if kind.processes <= cluster.config.workers_per_node:
            return _on_cpu(cluster, environment, kind.engines)
        return _next_to_ranks(cluster, environment, kind, ranks, ())
    if colocated.enabled:
        return _next_to_ranks(cluster, environment, kind, ranks, rank_gpus)
    return _apart(cluster, environment, kind, colocated)


@dataclass(frozen=True)
class Share:
    """The processes of an engine on one machine: `count` of them, from place `first` of the machine's on."""

    node: int
    first: int
    count: int


def shares_of(engine: int, size: int, per_node: int) -> tuple[Share, ...]:
    """Return where the processes of an engine are, `size` of each one, engine after engine over whole machines.

    per_node: places of a machine; it divides `size`, or is divided by it.
    """
    node, first = divmod(engine * size, per_node)
    if size <= per_node:
        return (Share(node, first, size),)
    return tuple(Share(node + further, 0, per_node) for further in range(size // per_node))


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
        options["scheduling_strategy"] = "SPREAD"  # one that restarts may find its machine gone
    return Placement(tuple(RankSlot(engine, environment, options) for engine in range(engines)))


def _next_to_ranks(
    cluster: RayCluster,
    environment: Mapping[str, str],
    kind: EngineKind,
    ranks: Placement,
    rank_gpus: Sequence[str],
) -> Placement:
    """Return each engine beside as many consecutive ranks as it has processes, on the GPUs that Ray has given those."""
    assert ranks.group is not None  # ranks on GPUs, and on several machines, have one
    per_node, nodes = cluster.config.workers_per_node, cluster.config.num_nodes
    slots: list[RankSlot] = []
    for engine in range(per_node * nodes // kind.processes if rank_gpus else kind.engines):
        for share, own in _shares(cluster, kind, engine, per_node, nodes, ranks.group):
            first = share.node * per_node + share.first
            gpus = {"CUDA_VISIBLE_DEVICES": ",".join(rank_gpus[first : first + share.count])}
            strategy = PlacementGroupSchedulingStrategy(ranks.group, placement_group_bundle_index=share.node)
            options = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": strategy}
            slots.append(RankSlot(engine, {**environment, **own, **gpus}, options))
    return Placement(tuple(slots))


def _apart(
    cluster: RayCluster, environment: Mapping[str, str], kind: EngineKind, colocated: ColocatedConfig
) -> Placement:
    """Return each engine on GPUs that Ray reserves for it."""
    resources, size = colocated.resources, kind.processes
    per_node, nodes = resources.gpus_per_node or size * kind.engines, resources.num_nodes or 1
    group = cluster.reserve_gpus(per_node, nodes)
    slots: list[RankSlot] = []
    for engine in range(per_node * nodes // size):
        for share, own in _shares(cluster, kind, engine, per_node, nodes, group):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=share.node)
            options = {"num_cpus": 1, "num_gpus": share.count, "scheduling_strategy": strategy}
            slots.append(RankSlot(engine, {**environment, **own}, options))
    return Placement(tuple(slots), group)


def _shares(
    cluster: RayCluster, kind: EngineKind, engine: int, per_node: int, nodes: int, group: PlacementGroup
) -> Iterator[tuple[Share, dict[str, str]]]:
    """Yield the shares of an engine, each with what tells its processes, where there are several, how to meet."""
    shares = shares_of(engine, kind.processes, per_node)
    shares = [replace(share, node=share.node % nodes) for share in shares]  # on CPU engines may be many
    if len(shares) == 1:
        yield shares[0], {}
        return
    addresses = [cluster.address_of(group, share.node) for share in shares]
    for number, share in enumerate(shares):
        yield share, Machines(addresses[0], addresses[number], number, len(shares)).environment()
