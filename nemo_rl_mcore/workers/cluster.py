"""The Ray session of a run, and the place of every rank in it."""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.workers.environment import only_environment, rank_environment, session_environment
from nemo_rl_mcore.workers.signals import deferred_stop_signals, kept_stop_handlers

_LOOPBACK = "127.0.0.1"
_LOCAL_OBJECT_STORE_BYTES = 256 << 20
_CPU_SHARE_OF_A_RANK = 0.1
_PROBE_TIMEOUT_S = 3.0
# Above Ray's worker ports and below Linux's ephemeral ports: nothing else takes one before rank 0 binds it.
_RENDEZVOUS_PORTS = range(20_000, 32_000)


@dataclass(frozen=True)
class RankSlot:
    """Where one rank runs, and the environment that tells it who it is."""

    rank: int
    environment: Mapping[str, str]
    options: Mapping[str, Any]
    """Scheduling options of the Ray actor."""


@dataclass(frozen=True)
class Placement:
    """The slots of one worker group; `release` gives the resources back."""

    slots: tuple[RankSlot, ...]
    group: PlacementGroup | None = None

    def release(self) -> None:
        """Free the reserved resources; nothing to do for CPU ranks."""
        if self.group is not None and ray.is_initialized():
            remove_placement_group(self.group)


class RayCluster:
    """A context manager: inside it there is a Ray session with room for `cluster.world_size` ranks.

    With RAY_ADDRESS in the environment it joins a cluster that runs; a session that the process already has
    is used and left alone; otherwise it starts a local one, which only this machine can reach, and ends it.

    Raises:
        RunStoppedError: the machines have fewer GPUs or nodes than `cluster.*` asks for, nothing answers at
            RAY_ADDRESS, or the local session does not come up.

    """

    def __init__(self, config: ClusterConfig, *, ready_timeout_s: float = 120) -> None:
        self.config = config
        """The machines."""
        self._address = os.environ.get("RAY_ADDRESS")
        self._ready_timeout_s = ready_timeout_s
        self._started_session = False
        self._is_local = self._address is None
        self.log_dir: Path | None = None
        """Folder of the workers' standard error, when they run on this machine."""

    def __enter__(self) -> Self:
        """Start or join the session."""
        try:
            self._start()
            self._check_resources()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop what `__enter__` started."""
        self.stop()

    def stop(self) -> None:
        """End the local session with all its processes, or leave the cluster; idempotent."""
        if self._started_session and ray.is_initialized():
            # A second Ctrl-C must not leave half of the session behind.
            with deferred_stop_signals():
                ray.shutdown()
        self._started_session = False

    def place_ranks(self) -> Placement:
        """Choose the rendezvous of one worker group and a slot for each of its ranks."""
        config = self.config
        group = None if config.on_cpu else self.reserve_gpus(config.gpus_per_node, config.num_nodes)
        return Placement(self._slots(group), group)

    def place_beside(self, ranks: Placement, gpus: Sequence[str]) -> Placement:
        """A further worker group on the machines of another one and, where these have some, on its GPUs, by rank."""
        if self.config.on_cpu:
            return self.place_ranks()
        slots = self._slots(ranks.group)
        shared = {"num_cpus": 0, "num_gpus": 0}  # Ray has given the GPUs to the other group
        return Placement(
            tuple(
                RankSlot(
                    slot.rank,
                    {**slot.environment, "CUDA_VISIBLE_DEVICES": gpu},
                    {**slot.options, **shared},
                )
                for slot, gpu in zip(slots, gpus, strict=True)
            )
        )

    def _slots(self, group: PlacementGroup | None) -> tuple[RankSlot, ...]:
        address = _LOOPBACK if self._is_local else _first_node_address(group)
        rendezvous = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port()), **self.local_network()}
        return tuple(self._slot(rank, rendezvous, group) for rank in range(self.config.world_size))

    def local_network(self) -> dict[str, str]:
        """Environment that keeps process groups inside this machine, when the session is."""
        # A laptop's host name need not resolve; gloo would ask for it.
        return {"GLOO_SOCKET_IFNAME": "lo"} if self._is_local else {}

    def _start(self) -> None:
        if ray.is_initialized():
            self._is_local = ray.get_runtime_context().gcs_address.startswith(_LOOPBACK)
            return
        if self._is_local and self.config.num_nodes > 1:
            raise RunStoppedError(
                f"cluster.num_nodes={self.config.num_nodes} needs a Ray cluster that runs: start one with "
                "`ray start` on every machine and set RAY_ADDRESS, or set cluster.num_nodes to 1"
            )
        self._started_session = True
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        context: Any = self._join(quiet) if self._address else self._start_local(quiet)
        self.log_dir = Path(context.address_info["session_dir"]) / "logs"

    def _start_local(self, quiet: Mapping[str, Any]) -> Any:
        on_cpu = self.config.on_cpu
        # Interrupted halfway, `ray.init` leaves processes that `ray.shutdown` does not know of.
        with deferred_stop_signals(), only_environment(session_environment(os.environ)):
            try:
                return ray.init(
                    address="local",
                    num_cpus=max(2, self.config.world_size),
                    num_gpus=0 if on_cpu else None,
                    object_store_memory=_LOCAL_OBJECT_STORE_BYTES if on_cpu else None,
                    include_dashboard=False,
                    _node_ip_address=_LOOPBACK,
                    **quiet,
                )
            except Exception as error:  # Ray raises it bare when one of its processes is late
                raise RunStoppedError(
                    f"the local Ray session did not start: {error}\nIs this machine out of memory, disk space "
                    "or process slots, or very busy? Ray's logs are in /tmp/ray/session_latest/logs; try again, "
                    "or start a cluster with `ray start --head` and set RAY_ADDRESS"
                ) from error

    def _join(self, quiet: Mapping[str, Any]) -> Any:
        address = self._address or ""
        try:
            _probe(address)
            with kept_stop_handlers():
                return ray.init(address=address, **quiet)
        except (OSError, ValueError) as error:
            raise RunStoppedError(
                f"cannot join the Ray cluster at RAY_ADDRESS={address} ({error}): is it running? A cluster with "
                "token authentication also needs RAY_AUTH_MODE=token. Unset RAY_ADDRESS for a local session"
            ) from error

    def _check_resources(self) -> None:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fitting = sum(node.get("GPU", 0) >= self.config.gpus_per_node for node in nodes)
        if fitting < self.config.num_nodes:
            found = ", ".join(f"{node.get('GPU', 0):.0f}" for node in nodes)
            raise RunStoppedError(
                f"cluster.num_nodes={self.config.num_nodes} with cluster.gpus_per_node="
                f"{self.config.gpus_per_node} does not fit: the machines that Ray sees have [{found}] GPUs; "
                "lower one of the two keys, or add machines"
            )

    def reserve_gpus(self, per_node: int, nodes: int) -> PlacementGroup:
        """GPUs, with a CPU each, on so many machines; raises RunStoppedError when they do not become free."""
        bundles: list[dict[str, float]] = [{"GPU": per_node, "CPU": per_node}] * nodes
        group = placement_group(bundles, strategy="STRICT_SPREAD")
        if not group.wait(self._ready_timeout_s):
            remove_placement_group(group)
            raise RunStoppedError(
                f"Ray did not free {per_node} GPUs and {per_node} CPUs on each of {nodes} machines within "
                f"{self._ready_timeout_s:g} s (cluster.gpus_per_node, cluster.num_nodes, "
                "policy.generation.colocated.resources); does another job use them?"
            )
        return group

    def _slot(self, rank: int, rendezvous: Mapping[str, str], group: PlacementGroup | None) -> RankSlot:
        node, local_rank = divmod(rank, self.config.workers_per_node)
        # Ray shows a rank only its own GPU, which therefore is device 0.
        identity = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.config.world_size),
            "LOCAL_RANK": str(local_rank if group is None else 0),
        }
        options: dict[str, Any] = {"num_cpus": _CPU_SHARE_OF_A_RANK, "num_gpus": 0}
        if group is not None:
            bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
            options = {"num_cpus": 1, "num_gpus": 1, "scheduling_strategy": bundle}
        inherited = rank_environment(os.environ, on_cpu=group is None)
        return RankSlot(rank, {**rendezvous, **inherited, **identity}, options)


def _probe(address: str) -> None:
    """Connect to `host:port` and hang up; Ray itself would retry in silence for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return  # "auto", or a form that Ray checks at once
    if int(port) not in range(1, 1 << 16):
        raise ValueError(f"no port {port}")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S).close()


def _first_node_address(group: PlacementGroup | None) -> str:
    """Address of the machine of rank 0, where the ranks meet."""
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    if group is None:
        return nodes[ray.get_runtime_context().get_node_id()]
    first = ray.util.placement_group_table(group)["bundles_to_node_id"][0]
    return nodes[first]


def free_port(attempts: int = 100) -> int:
    """Find a port that nothing listens on here."""
    generator = random.Random(os.getpid() ^ time.monotonic_ns())
    for _ in range(attempts):
        port = generator.choice(_RENDEZVOUS_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RunStoppedError(
        f"no free port for the rendezvous in {_RENDEZVOUS_PORTS.start}-{_RENDEZVOUS_PORTS.stop - 1}"
    )
