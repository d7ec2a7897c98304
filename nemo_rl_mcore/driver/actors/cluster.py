"""The Ray session of a run, the place of every rank in it, and which of its machines are there."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import ray
from ray._private.state import available_resources_per_node  # a developer API, without a public path
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType] - compiled
from ray.exceptions import RpcError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.driver.actors.failures import RankIdentity
from nemo_rl_mcore.driver.actors.places import Placement, RankSlot, has_port, probe, rank_environment
from nemo_rl_mcore.driver.actors.session import LOOPBACK, LocalSession, state_of
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.signals import current_stop_signals, deferred_stop_signals, kept_stop_handlers
from nemo_rl_mcore.errors import RunStoppedError

_CPU_SHARE_OF_A_RANK = 0.1
_AUTH_MODE = "RAY_AUTH_MODE"
_PROBE_EVERY_S, _MISSES = 3.0, 3
_ID_SHOWN = 8
_LOOK_EVERY_S = 0.2
_REPORTED_AFTER_S = 1.0
"""Ray tells of what was given back with a delay."""


class RayCluster:
    """A context manager: inside it there is a Ray session with room for `cluster.world_size` ranks.

    With RAY_ADDRESS in the environment it joins a cluster that runs; a session that the process already has
    is used and left alone; otherwise it starts a local one, which only this machine can reach, and ends it.

    Raises RunStoppedError: the machines have fewer GPUs or nodes than `cluster.*` asks for, nothing answers at
    RAY_ADDRESS, or the local session does not come up.
    """

    def __init__(self, config: ClusterConfig, *, ready_timeout_s: float = 120) -> None:
        self.config = config
        self._address = os.environ.get("RAY_ADDRESS")
        self._ready_timeout_s = ready_timeout_s
        self._session: LocalSession | None = None  # if it was started here
        self._joined = False
        self.one_machine = self._address is None and config.num_nodes == 1
        """All processes of the session are on this machine."""
        self._gcs: _GcsProbe | None = None
        ranks = config.workers_per_node
        cpus = round(ranks * _CPU_SHARE_OF_A_RANK, 4)
        self._share_of_a_node: dict[str, float] = (
            {"CPU": cpus} if config.on_cpu else {"GPU": ranks, "CPU": ranks}
        )  # what the ranks of one machine take of it
        self.log_dir: Path | None = None
        """Folder of the workers' standard error, when they run on this machine."""

    def __enter__(self) -> Self:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if ray.is_initialized():
                address = ray.get_runtime_context().gcs_address
                self.one_machine = address.startswith(LOOPBACK) and self.config.num_nodes == 1
                self._gcs = _GcsProbe(address)
            elif self._address:
                self._join(self._address, quiet)
            elif self.config.num_nodes > 1:
                raise RunStoppedError(
                    f"cluster.num_nodes={self.config.num_nodes} needs a Ray cluster that runs: start one with "
                    "`ray start` on every machine and set RAY_ADDRESS, or set cluster.num_nodes to 1",
                    code="no-cluster",
                )
            else:
                self._session = LocalSession()
                cpus = max(2, self.config.world_size)
                self._session.start(cpus=cpus, on_cpu=self.config.on_cpu, quiet=quiet)
                self.log_dir = self._session.log_dir
            self._check_resources()
        except BaseException:
            self.stop(keep_logs=True)
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.stop(keep_logs=isinstance(error, Exception))

    def shared_with(self, config: ClusterConfig) -> RayCluster:
        """Return the same session, with places for the ranks of another recipe; it is this one that ends it.

        Raises RunStoppedError as the class does.
        """
        other = RayCluster(config, ready_timeout_s=self._ready_timeout_s)
        other._session, other._gcs, other.one_machine = self._session, self._gcs, self.one_machine
        other.log_dir = self.log_dir
        other._check_resources()
        return other

    def stop(self, *, keep_logs: bool = False) -> None:
        # A second Ctrl-C must not leave half of the session behind.
        with deferred_stop_signals(hold=True):
            if self._session is not None:
                self._session.end(keep_logs=keep_logs)
            elif self._joined and ray.is_initialized():
                ray.shutdown()
        self._session, self._joined = None, False

    def _join(self, address: str, quiet: Mapping[str, Any]) -> None:
        self._joined = True
        try:
            probe(address)
            authenticate(address)
            with kept_stop_handlers():
                context: Any = ray.init(address=address, **quiet)
        except TokenRefusedError as error:
            raise RunStoppedError(
                f"the Ray cluster at RAY_ADDRESS={address} refuses this driver ({error}): set "
                "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to its token; without them "
                "~/.ray/auth_token is read. Unset RAY_ADDRESS for a local session",
                code="token-refused",
            ) from error
        except (OSError, ValueError) as error:
            raise RunStoppedError(
                f"cannot join the Ray cluster at RAY_ADDRESS={address} ({error}): is it running? "
                "Unset RAY_ADDRESS for a local session",
                code="no-cluster",
            ) from error
        self._gcs = _GcsProbe(ray.get_runtime_context().gcs_address)
        self.log_dir = Path(context.address_info["session_dir"]) / "logs"

    def _check_resources(self) -> None:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        wanted = self.config.num_nodes
        if self.config.on_cpu:
            cpus = self._share_of_a_node["CPU"]
            if (fitting := sum(node.get("CPU", 0) >= cpus for node in nodes)) < wanted:
                raise RunStoppedError(
                    f"cluster.num_nodes={wanted} does not fit: Ray sees {fitting} machines with "
                    f"{cpus:g} CPUs, which the ranks of one take; lower it, or add machines",
                    code="missing-machines",
                )
        elif sum(node.get("GPU", 0) >= self.config.gpus_per_node for node in nodes) < wanted:
            found = ", ".join(f"{node.get('GPU', 0):.0f}" for node in nodes)
            raise RunStoppedError(
                f"cluster.num_nodes={wanted} with cluster.gpus_per_node="
                f"{self.config.gpus_per_node} does not fit: the machines that Ray sees have [{found}] GPUs; "
                "lower one of the two keys, or add machines",
                code="missing-gpus",
            )

    def lost(self) -> str | None:
        """Return what of Ray itself has died, without which no rank can be reached; None while all is well."""
        if self._session is not None:
            return self._session.lost()
        return self._gcs.lost() if self._gcs is not None else None

    def process_state(self, identity: RankIdentity | None) -> str:
        """Give what the system says of a rank's process as the end of a sentence; empty for other machines."""
        if identity is None or self._session is None:
            return ""
        state = state_of(identity.pid)
        return ": its process is gone" if state == "gone" else f": its process is {state}"

    def lost_nodes(self, ids: Collection[str]) -> dict[str, str]:
        """Return those of the machines that are gone, by their id in Ray: how to call each of them.

        Of a local session a machine is never all that is gone.
        """
        known = [node for node in ids if node]
        return lost_nodes(known) if known and self._session is None else {}

    def await_machines(self) -> None:
        """Wait until there is room for all ranks; RunStoppedError where `cluster.node_wait_s` passes."""
        wanted, waited_s = self.config.num_nodes, self.config.node_wait_s
        if self.one_machine or (found := await_nodes(wanted, self._share_of_a_node, waited_s)) == wanted:
            return
        raise RunStoppedError(
            f"{found} of {wanted} machines (cluster.num_nodes) have room for {self.config.workers_per_node} rank(s) "
            f"each, {waited_s:g} s after they were asked for (cluster.node_wait_s). With these machines back, or "
            "others in their place, the same command goes on",
            code="missing-machines",
        )

    def kill(self, actor: Any, identity: RankIdentity | None) -> None:
        if self._session is not None and identity is not None:
            self._session.kill(identity.pid)  # also one that is stopped, which does not hear Ray
        if ray.is_initialized() and self.lost() is None:
            ray.kill(actor, no_restart=True)

    def place_ranks(self) -> Placement:
        """Choose the rendezvous of one worker group and a slot for each of its ranks."""
        # Ranks are given their machines by name, but for one machine, which has CPUs for all of them.
        alone = self.config.on_cpu and self.one_machine
        group = None if alone else self._reserve(self._share_of_a_node, self.config.num_nodes)
        return Placement(self._slots(group), group)

    def place_colocated(self, ranks: Placement, gpus: Sequence[str]) -> Placement:
        """Place a further worker group on the machines of another and, where these have some, on its GPUs, by rank."""
        slots = self._slots(ranks.group)
        if ranks.group is None:
            return Placement(slots)
        shared = {"num_cpus": 0, "num_gpus": 0}  # Ray has given them to the other group
        placed: list[RankSlot] = []
        for slot, gpu in zip(slots, gpus or [""] * len(slots), strict=True):
            seen = {} if self.config.on_cpu else {"CUDA_VISIBLE_DEVICES": gpu}
            placed.append(RankSlot(slot.rank, {**slot.environment, **seen}, {**slot.options, **shared}))
        return Placement(tuple(placed))

    def reserve_gpus(self, per_node: int, nodes: int) -> PlacementGroup:
        """GPUs, with a CPU each, on so many machines; raises RunStoppedError when they do not become free."""
        return self._reserve({"GPU": per_node, "CPU": per_node}, nodes)

    def local_network(self) -> dict[str, str]:
        # A laptop's host name need not resolve; gloo would ask for it.
        return {"GLOO_SOCKET_IFNAME": "lo"} if self.one_machine else {}

    def address_of(self, group: PlacementGroup | None, bundle: int = 0) -> str:
        """Return the address of the machine that a bundle is on, or of this one without a group, to meet there."""
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        if group is None:
            return nodes[ray.get_runtime_context().get_node_id()]
        return nodes[ray.util.placement_group_table(group)["bundles_to_node_id"][bundle]]

    def _reserve(self, of_each: Mapping[str, float], nodes: int) -> PlacementGroup:
        group = placement_group([dict(of_each)] * nodes, strategy="STRICT_SPREAD")
        if not group.wait(self._ready_timeout_s):
            remove_placement_group(group)
            asked = " and ".join(f"{amount:g} {name}s" for name, amount in of_each.items())
            keys = ("" if self.config.on_cpu else "cluster.gpus_per_node, ") + "cluster.num_nodes"
            raise RunStoppedError(
                f"Ray did not free {asked} on each of {nodes} machines within {self._ready_timeout_s:g} s ({keys}, "
                "policy.generation.colocated.resources); does another job use them?"
            )
        return group

    def _slots(self, group: PlacementGroup | None) -> tuple[RankSlot, ...]:
        config = self.config
        common = {
            "MASTER_ADDR": LOOPBACK if self.one_machine else self.address_of(group),
            **self.local_network(),
            **rank_environment(os.environ, on_cpu=config.on_cpu),
            "WORLD_SIZE": str(config.world_size),
        }
        resources = {"num_cpus": _CPU_SHARE_OF_A_RANK, "num_gpus": 0}
        if group is not None and not config.on_cpu:
            resources = {"num_cpus": 1, "num_gpus": 1}
        slots: list[RankSlot] = []
        for rank in range(config.world_size):
            node, local_rank = divmod(rank, config.workers_per_node)
            # Ray shows a rank only its own GPU, which therefore is device 0.
            own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank if config.on_cpu else 0)}
            options: dict[str, Any] = dict(resources)
            if group is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=node
                )
            slots.append(RankSlot(rank, common | own, options))
        return tuple(slots)


class TokenRefusedError(Exception):
    """A cluster does not take this driver's token, or its lack of one."""


def authenticate(address: str) -> None:
    """Settle whether the cluster at `host:port` takes this driver; the user's token is sent where it asks for one.

    Ray itself would retry for minutes, and might then end the driver. Raises TokenRefusedError at the first answer that
    refuses the token, or the lack of one.
    """
    try:
        from ray._private.authentication import authentication_token_setup as tokens
        from ray.exceptions import AuthenticationError
    except ImportError:
        return  # a Ray without tokens
    try:
        # First, since a GcsClient that is to send a token and finds none ends the process.
        tokens.ensure_token_if_auth_enabled(create_token_if_missing=False)
        if not has_port(address):
            return
        try:
            GcsClient(address=address)
        except AuthenticationError:
            # `ray start` asks for the token that it finds; a driver that names an address sends none by itself.
            if _AUTH_MODE in os.environ or not tokens.maybe_enable_token_auth_if_token_available(
                warn_if_disabled=False
            ):
                raise
            GcsClient(address=address)
    except RpcError:
        return  # no word about tokens: Ray is to find out what is wrong
    except AuthenticationError as error:
        raise TokenRefusedError(str(error).partition(". ")[0]) from error


class _GcsProbe:
    """Asks now and then; several misses in a row mean that the cluster's head is gone."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._asked_at = time.monotonic()
        self._misses = 0
        self._lock = threading.Lock()  # two threads that ask at once miss once

    def lost(self) -> str | None:
        with self._lock:
            if self._misses < _MISSES and time.monotonic() - self._asked_at >= _PROBE_EVERY_S:
                try:
                    probe(self._address)
                    self._misses = 0
                except OSError:
                    self._misses += 1
                self._asked_at = time.monotonic()
        return f"Ray's GCS at {self._address} does not answer" if self._misses >= _MISSES else None


def lost_nodes(ids: Collection[str]) -> dict[str, str]:
    """Return those of the machines that are gone, by their id in Ray: how to call each of them.

    Ray itself knows of one that is gone only after missed health checks (about 14 seconds with its defaults). Its
    raylet listens on a port, which tells at once; one that is only slow to answer is for Ray to judge.
    """
    return {
        node["NodeID"]: f"{node['NodeID'][:_ID_SHOWN]} ({node['NodeManagerAddress']})"
        for node in ray.nodes()
        if node["NodeID"] in ids and (not node["Alive"] or isinstance(_probed(node), ConnectionRefusedError))
    }


def await_nodes(wanted: int, needed: Mapping[str, float], within_s: float) -> int:
    """Return how many machines have so much of each resource free: as many as are wanted, or fewer after so long."""
    start, told = time.monotonic(), False
    while True:
        free = available_resources_per_node()
        found = sum(
            node["Alive"] and _probed(node) is None
            for node in ray.nodes()
            if all(free.get(node["NodeID"], {}).get(name, 0.0) >= amount for name, amount in needed.items())
        )
        waited_s = time.monotonic() - start
        if found >= wanted or waited_s >= within_s:
            return min(found, wanted)
        if waited_s > _REPORTED_AFTER_S and not told:
            told = True
            what = f"waiting for {wanted - found} of {wanted} machines (cluster.num_nodes)"
            write_line(sys.stderr, f"{what}, {within_s:g} s at most (cluster.node_wait_s)")
        signals = current_stop_signals()
        signals.stop_if_asked()
        # Where signals wait for a block to end, this is too long for them.
        if signals.asked or signals.time_is_up:
            raise RunStoppedError("the run was to stop while it waited for machines")
        time.sleep(_LOOK_EVERY_S)


def _probed(node: Mapping[str, Any]) -> OSError | None:
    try:
        probe(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
    except OSError as error:
        return error
    return None
