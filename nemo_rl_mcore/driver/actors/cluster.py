"""The Ray session of a run, the place of every rank in it, and which of its machines are there."""

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
    has_port,
    only_environment,
    probe,
    rank_environment,
    session_environment,
)
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.signals import current_stop_signals, deferred_stop_signals, kept_stop_handlers
from nemo_rl_mcore.errors import RunStoppedError

LOOPBACK = "127.0.0.1"
_OBJECT_STORE_BYTES = 256 << 20
_SERVERS = ("raylet", "gcs_server")


class LocalSession:
    """The session of this process; only this machine can reach it, and only this user its folder.

    log_dir: folder of the workers' standard error, once it has started.
    """

    def __init__(self) -> None:
        self.log_dir: Path | None = None
        # For this user alone; not under TMPDIR, since the names of Unix sockets must be short.
        parent = os.environ.get("RAY_TMPDIR", "/tmp")
        folder = tempfile.mkdtemp(prefix="nemo_rl_mcore_", dir=parent)
        self.folder = Path(folder).resolve()  # as /proc shows it
        self._reaper = Reaper("writers", str(self.folder))
        self._begun = False
        self._servers: Mapping[str, int] = {}

    def start(self, *, cpus: int, on_cpu: bool, quiet: Mapping[str, Any]) -> None:
        """Start Ray; `quiet` are further arguments of `ray.init`. On CPU it has no GPUs, and a small object store.

        Raises RunStoppedError when it does not come up; `end` is to follow in any case.
        """
        asked_for = os.environ.get(LISTEN_ON_ALL_INTERFACES, "0").lower() in ("1", "true")
        if not asked_for and (address := ray.util.get_node_ip_address()) != LOOPBACK:
            raise RunStoppedError(
                f"a local Ray session would listen on every network, at {address}, since ray was imported before "
                f"nemo_rl_mcore.driver.actors, which has it stay on this machine: import that first, or export "
                f"{LISTEN_ON_ALL_INTERFACES}=0. With 1 it listens everywhere"
            )
        self._begun = True
        # Interrupted halfway, `ray.init` leaves processes that `ray.shutdown` does not know of.
        with deferred_stop_signals(hold=True), only_environment(session_environment(os.environ)):
            # Schedulers and terminals send these to all processes, but the driver decides what becomes of its ranks.
            # Ray itself keeps Ctrl-C away from them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))
            try:
                context: Any = ray.init(
                    address="local",
                    num_cpus=cpus,
                    num_gpus=0 if on_cpu else None,
                    object_store_memory=_OBJECT_STORE_BYTES if on_cpu else None,
                    include_dashboard=False,
                    _node_ip_address=LOOPBACK,
                    # Which Ray opens to everybody: hence the folder above it.
                    _temp_dir=str(self.folder / "ray"),
                    **quiet,
                )
            except Exception as error:  # Ray raises it bare when one of its processes is late
                raise RunStoppedError(
                    f"the local Ray session did not start: {error}\nIs this machine out of memory, disk space "
                    f"or process slots, or very busy? Ray's logs are in {self.folder}; try again, "
                    "or start a cluster with `ray start --head` and set RAY_ADDRESS",
                    code="session-start",
                ) from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self.log_dir = Path(context.address_info["session_dir"]) / "logs"
        pids = {name: one.pid for name, one in processes_of(self.folder)}
        self._servers = {name: pids[name] for name in _SERVERS if name in pids}

    def lost(self) -> str | None:
        """Return which of Ray's servers has died: without them no rank can be started, asked or ended."""
        for name, pid in self._servers.items():
            if state_of(pid) == "gone":
                return f"Ray's {name} (pid {pid}) died"
        return None

    def end(self, *, keep_logs: bool) -> None:
        # From a session that is lost this process takes leave at its very end, which may take Ray some seconds.
        if self._begun and self.lost() is None and ray.is_initialized():
            # Ray asks its processes to stop one by one, and waits a second for those that do not listen. Without the
            # raylet, which goes with its agents, Ray would end this process here and now, whatever it has to say yet.
            kill(
                [one for name, one in processes_of(self.folder) if not name.startswith((*_SERVERS, "ray::"))]
            )
            ray.shutdown()
        else:
            # Ray's would tell a dead server of an exception, and wait for it.
            sys.excepthook = sys.__excepthook__
        stuck = kill([process for _, process in processes_of(self.folder)])
        self._reaper.dismiss()
        if not keep_logs and not stuck:
            shutil.rmtree(self.folder, ignore_errors=True)


def processes_of(folder: Path) -> list[tuple[str, psutil.Process]]:
    """Return every process of the session whose folder this is, known by where it writes, with its name."""
    found: list[tuple[str, psutil.Process]] = []
    for pid in reaper.writers(str(folder)):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found.append((process.name(), process))
    return found


def kill(processes: Collection[psutil.Process], wait_s: float = 5.0) -> list[psutil.Process]:
    """Kill the processes, stopped ones too, and return those that are still there after `wait_s` seconds."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return psutil.wait_procs(processes, timeout=wait_s)[1]


def state_of(pid: int) -> str:
    """Return the state of a process of this machine: "running", "stopped", ..., or "gone"."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    return "gone" if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else str(status)


class Reaper:
    """A process that waits for the end of this one; if it ends without `dismiss`, the reaper kills whom it is to kill.

    who, of: arguments of `reaper`. Ray's own processes notice a dead driver too, but some of them only after a minute.
    """

    def __init__(self, who: str, of: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, who, of],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", "")},
            start_new_session=True,  # what is sent to the driver's process group is not for the reaper
        )

    def dismiss(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):  # somebody killed it
                self._process.stdin.write(b"done\n")
                self._process.stdin.close()
            self._process.wait()


@contextmanager
def marked_processes() -> Generator[dict[str, str]]:
    """Yield a variable for the environment of processes that end, with all they start, where this one is killed."""
    name, value = "NEMO_RL_RUN", secrets.token_hex(16)
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

        Of a local session a machine is never all that is gone. Ray itself knows of one only after missed health checks
        (about 14 seconds with its defaults). Its raylet listens on a port, which tells at once; one that is only slow
        to answer is for Ray to judge.
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
            # Also one that is stopped, which does not hear Ray.
            own = [one for _, one in processes_of(self._session.folder) if one.pid == identity.pid]
            kill(own, wait_s=0)
        if ray.is_initialized() and self.lost() is None:
            ray.kill(actor, no_restart=True)

    def place_ranks(self) -> Placement:
        # Ranks are given their machines by name, but for one machine, which has CPUs for all of them.
        alone = self.config.on_cpu and self.one_machine
        group = None if alone else self.reserve(self._share_of_a_node, self.config.num_nodes)
        return Placement(self._slots(group), group)

    def place_colocated(self, ranks: Placement, gpus: Sequence[str]) -> Placement:
        slots = self._slots(ranks.group)
        if ranks.group is None:
            return Placement(slots)
        shared = {"num_cpus": 0, "num_gpus": 0}  # Ray has given them to the other group
        placed: list[RankSlot] = []
        for slot, gpu in zip(slots, gpus or [""] * len(slots), strict=True):
            seen = {} if self.config.on_cpu else {"CUDA_VISIBLE_DEVICES": gpu}
            placed.append(RankSlot(slot.rank, {**slot.environment, **seen}, {**slot.options, **shared}))
        return Placement(tuple(placed))

    def local_network(self) -> dict[str, str]:
        # A laptop's host name need not resolve; gloo would ask for it.
        return {"GLOO_SOCKET_IFNAME": "lo"} if self.one_machine else {}

    def address_of(self, group: PlacementGroup | None, bundle: int = 0) -> str:
        """Return the address of the machine that a bundle is on, or of this one without a group, to meet there."""
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        if group is None:
            return nodes[ray.get_runtime_context().get_node_id()]
        return nodes[ray.util.placement_group_table(group)["bundles_to_node_id"][bundle]]

    def reserve(self, of_each: Mapping[str, float], nodes: int) -> PlacementGroup:
        """Have so much of each resource on so many machines; raises RunStoppedError when it does not become free."""
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


@dataclass
class _GcsProbe:
    address: str
    asked_at: float = field(default_factory=time.monotonic)
    misses: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)  # two threads that ask at once miss once

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
