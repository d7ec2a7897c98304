"""A run's Ray session, the place of every rank in it, and its machines."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import ray
from ray._private.state import available_resources_per_node  # a developer API, without a public path
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType] - compiled
from ray.exceptions import RpcError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.driver.actors import reaper
from nemo_rl_mcore.driver.actors.failures import RankIdentity
from nemo_rl_mcore.driver.actors.places import (
    LISTEN_ON_ALL_INTERFACES,
    Placement,
    RankSlot,
    only_environment,
    probe,
    rank_environment,
    session_environment,
)
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.signals import current_stop_signals, deferred_stop_signals, kept_stop_handlers
from nemo_rl_mcore.errors import RunStoppedError

LOOPBACK = "127.0.0.1"
LOCAL_NETWORK = {"GLOO_SOCKET_IFNAME": "lo"}
"""For processes on a single machine: gloo would resolve the host name, which may fail on a laptop."""
NODE_WAIT_S = 300.0
"""Seconds to wait for a lost machine to return or be replaced."""
_OBJECT_STORE_BYTES = 256 << 20
_SERVERS = ("raylet", "gcs_server")


_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


class LocalSession:
    """A Ray session of this process, reachable only from this machine; its folder is readable only by this user.

    log_dir: the folder with the workers' standard error, once the session has started.
    """

    def __init__(self) -> None:
        self.log_dir: Path | None = None
        # For this user alone; not under TMPDIR, since Unix sockets must have short names.
        folder = tempfile.mkdtemp(prefix="nemo_rl_mcore_", dir=os.environ.get("RAY_TMPDIR", "/tmp"))
        self.folder = Path(folder).resolve()  # as in /proc
        self._reaper = Reaper("writers", str(self.folder))
        self._begun = False
        self._servers: Mapping[str, int] = {}

    def start(self, config: ClusterConfig) -> None:
        """Start Ray; on CPU, without GPUs and with a small object store. The caller must call `end`, even after errors.

        Raises RunStoppedError if Ray does not start.
        """
        asked_for = os.environ.get(LISTEN_ON_ALL_INTERFACES, "0").lower() in ("1", "true")
        if not asked_for and (address := ray.util.get_node_ip_address()) != LOOPBACK:
            raise RunStoppedError(
                f"a local Ray session would listen on every network, at {address}, since ray was imported before "
                f"nemo_rl_mcore.driver.actors, which has it stay on this machine: import that first, or export "
                f"{LISTEN_ON_ALL_INTERFACES}=0. With 1 it listens everywhere"
            )
        self._begun = True
        # An interrupted `ray.init` leaves processes behind that `ray.shutdown` does not stop.
        with deferred_stop_signals(hold=True), only_environment(session_environment(os.environ)):
            # Schedulers and terminals send these signals to all processes, but only the driver should stop its ranks.
            # Ray itself shields the ranks from Ctrl-C.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))
            try:
                context: Any = ray.init(
                    address="local",
                    num_cpus=max(2, config.world_size),
                    num_gpus=0 if config.on_cpu else None,
                    object_store_memory=_OBJECT_STORE_BYTES if config.on_cpu else None,
                    include_dashboard=False,
                    _node_ip_address=LOOPBACK,
                    # Ray makes this folder readable by all users, so its parent is private.
                    _temp_dir=str(self.folder / "ray"),
                    **_QUIET,
                )
            except Exception as error:  # Ray raises a bare Exception if one of its processes is late
                raise RunStoppedError(
                    f"the local Ray session did not start: {error}\nIs this machine out of memory, disk space "
                    f"or process slots, or very busy? Ray's logs are in {self.folder}; try again, "
                    "or start a cluster with `ray start --head` and set RAY_ADDRESS",
                    code="session-start",
                ) from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self.log_dir = Path(context.address_info["session_dir"]) / "logs"
        self._servers = {name: one.pid for name, one in processes_of(self.folder) if name in _SERVERS}

    def lost(self) -> str | None:
        """Return a description of a dead Ray server, or None; ranks cannot be started, called or ended without it."""
        for name, pid in self._servers.items():
            if state_of(pid) == "gone":
                return f"Ray's {name} (pid {pid}) died"
        return None

    def end(self, *, keep_logs: bool) -> None:
        # Ray disconnects from a lost session only when this process exits, which may take some seconds.
        if self._begun and self.lost() is None and ray.is_initialized():
            # Ray stops its processes one by one and waits a second for each that does not react. Spare the raylet,
            # which ends with its agents: without it Ray would end this process at once.
            kill(
                [one for name, one in processes_of(self.folder) if not name.startswith((*_SERVERS, "ray::"))]
            )
            ray.shutdown()
        else:
            # Ray's hook would try to report an exception to a dead server and block.
            sys.excepthook = sys.__excepthook__
        stuck = kill([process for _, process in processes_of(self.folder)])
        self._reaper.dismiss()
        if not keep_logs and not stuck:
            shutil.rmtree(self.folder, ignore_errors=True)


def processes_of(folder: Path) -> list[tuple[str, psutil.Process]]:
    """Return the names and handles of all processes that write to the session's folder."""
    found: list[tuple[str, psutil.Process]] = []
    for pid in reaper.writers(str(folder)):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found.append((process.name(), process))
    return found


def kill(processes: Collection[psutil.Process], wait_s: float = 5.0) -> list[psutil.Process]:
    """Kill the processes, including stopped ones, and return those still running after `wait_s` seconds."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return psutil.wait_procs(processes, timeout=wait_s)[1]


def state_of(pid: int) -> str:
    """Return the state of a process on this machine: "running", "stopped", ..., or "gone"."""
    with suppress(psutil.NoSuchProcess):
        status = psutil.Process(pid).status()
        if status not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return str(status)
    return "gone"


class Reaper:
    """A process that kills others (see `reaper`) if this one exits without `dismiss`; Ray would take a minute."""

    def __init__(self, who: str, of: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, who, of],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", "")},
            start_new_session=True,  # signals to the driver's process group must not reach the reaper
        )

    def dismiss(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):  # the reaper was killed
                self._process.stdin.write(b"done\n")
                self._process.stdin.close()
            self._process.wait()


@contextmanager
def marked_processes() -> Generator[dict[str, str]]:
    """Yield an environment variable that marks processes to be killed, with their children, if this process dies."""
    name = "NEMO_RL_RUN"
    value = secrets.token_hex(16)
    killer = Reaper("family", f"{name}={value}")
    try:
        yield {name: value}
    finally:
        killer.dismiss()


_CPU_SHARE_OF_A_RANK = 0.1
_AUTH_MODE = "RAY_AUTH_MODE"
_PROBE_EVERY_S, _MISSES = 3.0, 3
_ID_SHOWN = 8
_LOOK_EVERY_S = 0.2
_REPORTED_AFTER_S = 1.0
"""Ray reports freed resources with a delay."""
_FREED_WITHIN_S = 120.0


class RayCluster:
    """A context manager that provides a Ray session with room for `cluster.world_size` ranks.

    A session that this process already has is used and left running. Otherwise the driver joins the cluster at
    RAY_ADDRESS, if set, or starts and later ends a local session that only this machine can reach.

    log_dir: the folder with the workers' standard error, if they run on this machine. one_machine: True if all of the
    session's processes run on this machine. Raises RunStoppedError if the machines have fewer GPUs or nodes than
    `cluster.*` requires, RAY_ADDRESS does not answer, or the local session does not start.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self._address = os.environ.get("RAY_ADDRESS")
        self._session: LocalSession | None = None  # only if started here
        self._joined = False
        self.one_machine = self._address is None and config.num_nodes == 1
        self._gcs: _GcsProbe | None = None
        ranks = config.workers_per_node
        cpu = {"CPU": round(ranks * _CPU_SHARE_OF_A_RANK, 4)}
        # Resources for the ranks on one machine.
        self._share_of_a_node: dict[str, float] = cpu if config.on_cpu else {"GPU": ranks, "CPU": ranks}
        self.log_dir: Path | None = None

    def __enter__(self) -> Self:
        try:
            if ray.is_initialized():
                address = ray.get_runtime_context().gcs_address
                self.one_machine = address.startswith(LOOPBACK) and self.config.num_nodes == 1
                self._gcs = _GcsProbe(address)
            elif self._address:
                self._join(self._address)
            elif self.config.num_nodes > 1:
                raise RunStoppedError(
                    f"cluster.num_nodes={self.config.num_nodes} needs a Ray cluster that runs: start one with "
                    "`ray start` on every machine and set RAY_ADDRESS, or set cluster.num_nodes to 1",
                    code="no-cluster",
                )
            else:
                self._session = LocalSession()
                self._session.start(self.config)
                self.log_dir = self._session.log_dir
            self._check_resources()
        except BaseException:
            self.stop(keep_logs=True)
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.stop(keep_logs=isinstance(error, Exception))

    def shared_with(self, config: ClusterConfig) -> RayCluster:
        """Return a cluster for another recipe's ranks in the same session; raise the class's errors."""
        other = RayCluster(config)
        other._session = self._session
        other._gcs = self._gcs
        other.one_machine = self.one_machine
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
        self._session = None
        self._joined = False

    def _join(self, address: str) -> None:
        self._joined = True
        try:
            authenticate(address, has_port=probe(address))
            with kept_stop_handlers():
                context: Any = ray.init(address=address, **_QUIET)
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
        """Return a description of the failed part of Ray that makes ranks unreachable; None while all is well."""
        if self._session is not None:
            return self._session.lost()
        return self._gcs.lost() if self._gcs is not None else None

    def process_state(self, identity: RankIdentity | None) -> str:
        """Return the state of a rank's process as a phrase that ends a sentence; empty for other machines."""
        if identity is None or self._session is None:
            return ""
        return f": its process is {state_of(identity.pid)}"

    def lost_nodes(self, ids: Collection[str]) -> dict[str, str]:
        """Return the names of lost machines by their Ray ids; empty for a local session.

        Ray itself notices a loss only after missed health checks (about 14 seconds), but a dead raylet's port refuses
        connections at once. A slow raylet is left to Ray's checks.
        """
        if self._session is not None or not any(ids):
            return {}
        return {
            node["NodeID"]: f"{node['NodeID'][:_ID_SHOWN]} ({node['NodeManagerAddress']})"
            for node in ray.nodes()
            if node["NodeID"] in ids
            and (not node["Alive"] or isinstance(_probed(node), ConnectionRefusedError))
        }

    def await_machines(self) -> None:
        wanted, waited_s = self.config.num_nodes, NODE_WAIT_S
        if self.one_machine or (found := await_nodes(wanted, self._share_of_a_node, waited_s)) == wanted:
            return
        raise RunStoppedError(
            f"{found} of {wanted} machines (cluster.num_nodes) have room for {self.config.workers_per_node} rank(s) "
            f"each, {waited_s:g} s after they were asked for. With these machines back, or "
            "others in their place, the same command goes on",
            code="missing-machines",
        )

    def kill(self, actor: Any, identity: RankIdentity | None) -> None:
        if self._session is not None and identity is not None:
            # Ray cannot end a process that is stopped.
            own = [one for _, one in processes_of(self._session.folder) if one.pid == identity.pid]
            kill(own, wait_s=0)
        if ray.is_initialized() and self.lost() is None:
            ray.kill(actor, no_restart=True)

    def place_ranks(self) -> Placement:
        # A placement group assigns ranks to machines; on CPU, a single machine has room for all of them.
        alone = self.config.on_cpu and self.one_machine
        group = None if alone else self.reserve(self._share_of_a_node, self.config.num_nodes)
        return Placement(self._slots(group), group)

    def place_colocated(self, ranks: Placement, gpus: Sequence[str]) -> Placement:
        slots = self._slots(ranks.group)
        if ranks.group is None:
            return Placement(slots)
        shared = {"num_cpus": 0, "num_gpus": 0}  # Ray has already given these to the other group
        placed: list[RankSlot] = []
        for slot, gpu in zip(slots, gpus or [""] * len(slots), strict=True):
            seen = {} if self.config.on_cpu else {"CUDA_VISIBLE_DEVICES": gpu}
            placed.append(RankSlot(slot.rank, {**slot.environment, **seen}, {**slot.options, **shared}))
        return Placement(tuple(placed))

    def address_of(self, group: PlacementGroup | None, bundle: int = 0) -> str:
        """Return the address of a bundle's machine, or of this machine without a group, for a rendezvous."""
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        if group is None:
            return nodes[ray.get_runtime_context().get_node_id()]
        return nodes[ray.util.placement_group_table(group)["bundles_to_node_id"][bundle]]

    def reserve(self, of_each: Mapping[str, float], nodes: int) -> PlacementGroup:
        """Reserve the resources on each of `nodes` machines; raise RunStoppedError if they are not freed in time."""
        group = placement_group([dict(of_each)] * nodes, strategy="STRICT_SPREAD")
        if not group.wait(_FREED_WITHIN_S):
            remove_placement_group(group)
            asked = " and ".join(f"{amount:g} {name}s" for name, amount in of_each.items())
            keys = ("" if self.config.on_cpu else "cluster.gpus_per_node, ") + "cluster.num_nodes"
            raise RunStoppedError(
                f"Ray did not free {asked} on each of {nodes} machines within {_FREED_WITHIN_S:g} s ({keys}, "
                "policy.generation.colocated.resources); does another job use them?"
            )
        return group

    def _slots(self, group: PlacementGroup | None) -> tuple[RankSlot, ...]:
        config = self.config
        common = {
            "MASTER_ADDR": LOOPBACK if self.one_machine else self.address_of(group),
            **(LOCAL_NETWORK if self.one_machine else {}),
            **rank_environment(os.environ, on_cpu=config.on_cpu),
            "WORLD_SIZE": str(config.world_size),
        }
        resources = {"num_cpus": _CPU_SHARE_OF_A_RANK, "num_gpus": 0}
        if group is not None and not config.on_cpu:
            resources = {"num_cpus": 1, "num_gpus": 1}
        slots: list[RankSlot] = []
        for rank in range(config.world_size):
            node, local_rank = divmod(rank, config.workers_per_node)
            # A rank's only visible GPU is its own, device 0.
            own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank if config.on_cpu else 0)}
            options: dict[str, Any] = dict(resources)
            if group is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=node
                )
            slots.append(RankSlot(rank, common | own, options))
        return tuple(slots)


class TokenRefusedError(Exception):
    """A cluster refuses this driver's token, or requires a token that it does not have."""


def authenticate(address: str, *, has_port: bool) -> None:
    """Raise TokenRefusedError if the cluster refuses the user's token; Ray would retry and then end the driver.

    Without a port, as in "auto", only the token itself is checked.
    """
    try:
        from ray._private.authentication import authentication_token_setup as tokens
        from ray.exceptions import AuthenticationError
    except ImportError:
        return  # a Ray without tokens
    try:
        # Check first: a GcsClient ends the process if it needs a token and finds none.
        tokens.ensure_token_if_auth_enabled(create_token_if_missing=False)
        if not has_port:
            return
        try:
            GcsClient(address=address)
        except AuthenticationError:
            # `ray start` requires the token that it finds, but a driver with an address sends none by default.
            if _AUTH_MODE in os.environ or not tokens.maybe_enable_token_auth_if_token_available(
                warn_if_disabled=False
            ):
                raise
            GcsClient(address=address)
    except RpcError:
        return  # not a token problem: `ray.init` reports it
    except AuthenticationError as error:
        raise TokenRefusedError(str(error).partition(". ")[0]) from error


@dataclass
class _GcsProbe:
    address: str
    asked_at: float = field(default_factory=time.monotonic)
    misses: int = 0
    # Two simultaneous checks count as one miss.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def lost(self) -> str | None:
        with self.lock:
            if self.misses < _MISSES and time.monotonic() - self.asked_at >= _PROBE_EVERY_S:
                try:
                    probe(self.address)
                    self.misses = 0
                except OSError:
                    self.misses += 1
                self.asked_at = time.monotonic()
        return f"Ray's GCS at {self.address} does not answer" if self.misses >= _MISSES else None


def await_nodes(wanted: int, needed: Mapping[str, float], within_s: float) -> int:
    """Wait until `wanted` machines have the resources free; return how many do, which is fewer after a timeout."""
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
            write_line(sys.stderr, f"{what}, {within_s:g} s at most")
        signals = current_stop_signals()
        signals.stop_if_asked()
        if signals.stopping:  # a deferred stop request, which this wait would delay
            raise RunStoppedError("the run was to stop while it waited for machines")
        time.sleep(_LOOK_EVERY_S)


def _probed(node: Mapping[str, Any]) -> OSError | None:
    try:
        probe(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
    except OSError as error:
        return error
    return None
