"""Place the engines of a run: separate processes on CPU, on the ranks' GPUs, or on separate GPUs.

An engine has a slot on each machine that it has processes on, the first of which the driver calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_mcore.config.generation import ColocatedConfig, GenerationConfig
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.places import Placement, RankSlot, rank_environment
from nemo_rl_mcore.engine.engine import EngineKind, EngineMachines

_CPU_SHARE_OF_AN_ENGINE = 0.1


def place_engines(
    cluster: RayCluster,
    kind: EngineKind,
    colocated: ColocatedConfig,
    ranks: Placement,
    rank_gpus: Sequence[str],
) -> Placement:
    """Return a slot for each engine; `rank_gpus` are the GPUs of the training ranks, by rank, and empty on CPU."""
    config, size, on_cpu = cluster.config, kind.processes, cluster.config.on_cpu
    environment = {**rank_environment(os.environ, on_cpu=on_cpu), **kind.environment}
    if on_cpu:
        environment |= cluster.local_network()
    if on_cpu and size <= config.workers_per_node:
        options: dict[str, Any] = {"num_cpus": _CPU_SHARE_OF_AN_ENGINE, "num_gpus": 0}
        if not cluster.one_machine:
            options["scheduling_strategy"] = "SPREAD"  # one that restarts may find its machine gone
        return Placement(tuple(RankSlot(engine, environment, options) for engine in range(kind.engines)))
    beside = on_cpu or colocated.enabled
    if (
        beside
    ):  # each next to as many consecutive ranks as it has processes, on the GPUs that Ray has given those
        assert ranks.group is not None  # ranks on GPUs, and on several machines, have one
        per_node, nodes, group = config.workers_per_node, config.num_nodes, ranks.group
    else:  # on GPUs that Ray reserves for them
        resources = colocated.resources
        per_node, nodes = resources.gpus_per_node or size * kind.engines, resources.num_nodes or 1
        group = cluster.reserve_gpus(per_node, nodes)
    slots: list[RankSlot] = []
    for engine in range(kind.engines if beside and not rank_gpus else per_node * nodes // size):
        for share, own in _shares(cluster, kind, engine, per_node, nodes, group):
            takes = {"num_cpus": 0, "num_gpus": 0} if beside else {"num_cpus": 1, "num_gpus": share.count}
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=share.node)
            if beside:
                first = share.node * per_node + share.first
                own["CUDA_VISIBLE_DEVICES"] = ",".join(rank_gpus[first : first + share.count])
            slots.append(RankSlot(engine, {**environment, **own}, {**takes, "scheduling_strategy": strategy}))
    return Placement(tuple(slots), None if beside else group)


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
        yield share, EngineMachines(addresses[0], addresses[number], number, len(shares)).environment()


def transport_of(cluster: RayCluster, generation: GenerationConfig) -> str:
    """Return the transport that is asked for, or the fastest one there is."""
    if generation.refit_transport is not None:
        return generation.refit_transport
    if cluster.config.on_cpu:
        return "shared_memory" if cluster.one_machine else "ray"
    return "cuda_ipc" if generation.colocated.enabled else "nccl"
