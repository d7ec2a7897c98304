"""Engines of any kind from nothing to where weights can be sent to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.generation.engine import EngineKind
from nemo_rl_mcore.generation.refit.sender import BroadcastRendezvous, Engines, RefitSettings
from nemo_rl_mcore.generation.refit.verification import Digests
from nemo_rl_mcore.workers.cluster import Placement, RayCluster
from nemo_rl_mcore.workers.engine_placement import place_engines, transport_of
from nemo_rl_mcore.workers.ray_engines import RayEngines
from nemo_rl_mcore.workers.worker_group import RayWorkerGroup


class WeightSource(Protocol):
    """Who has the weights; `workers.policy.Policy` does."""

    @property
    def placement(self) -> Placement:
        """Where its ranks run."""
        ...

    def gpus(self) -> Sequence[str]:
        """The GPU of each rank; empty on CPU."""
        ...

    def connect_engines(self, engines: Engines, settings: RefitSettings) -> BroadcastRendezvous | None:
        """Get ready to send to these engines, and to no others any more; says where to meet for a broadcast."""
        ...

    def send_weights(self) -> Digests:
        """Stream all weights to the engines; returns the tensors by name, with digests where they are verified."""
        ...


def start_engines(
    kind: EngineKind, config: PolicyConfig, cluster: RayCluster, source: WeightSource
) -> RayWorkerGroup:
    """All engines of a run, to which the source is connected; they hold no weights yet."""
    engines = RayWorkerGroup(
        kind.engine,
        cluster,
        (kind.settings,),
        start_timeout_s=kind.start_timeout_s,
        call_timeout_s=kind.call_timeout_s,
        deadline_keys=kind.section,
        placement=place_engines(cluster, kind, config.generation.colocated, source.placement, source.gpus()),
        name=kind.name,
        noun="engine",
    )
    try:
        settings = RefitSettings(
            transport_of(cluster, config.generation),
            kind.bucket_bytes,
            kind.call_timeout_s,
            receivers=engines.world_size * kind.gpus,
            verify=config.generation.verify_refit,
            held_as=kind.precision,
        )
        _connect(engines, kind, settings, source)
    except BaseException:
        engines.shutdown()
        raise
    return engines


def _connect(
    engines: RayWorkerGroup, kind: EngineKind, settings: RefitSettings, source: WeightSource
) -> None:
    """Tell the ranks which engines to send to."""
    reached = RayEngines(engines.actors, kind.noun, f"{kind.section}.call_timeout_s")
    rendezvous = source.connect_engines(reached, settings)
    if rendezvous is not None:
        engines.run_all(
            "join_broadcast",
            per_rank_kwargs=[{"first_rank": 1 + engine * kind.gpus} for engine in range(engines.world_size)],
            address=rendezvous.address,
            port=rendezvous.port,
            world_size=rendezvous.world_size,
            timeout_s=settings.timeout_s,
        )
