"""The Ray session of a run, and the place of every rank in it."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.driver.actors.environment import rank_environment
from nemo_rl_mcore.driver.actors.failures import RankIdentity
from nemo_rl_mcore.driver.actors.gcs_probe import GcsProbe, TokenRefusedError, authenticate, probe
from nemo_rl_mcore.driver.actors.local_session import LOOPBACK, LocalSession
from nemo_rl_mcore.driver.actors.nodes import await_nodes, lost_nodes
from nemo_rl_mcore.driver.actors.placement import Placement, RankSlot
from nemo_rl_mcore.driver.actors.raylet_watch import RayletDiedError
from nemo_rl_mcore.driver.actors.session_processes import state_of
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.signals import deferred_stop_signals, kept_stop_handlers
from nemo_rl_mcore.errors import RunStoppedError

_CPU_SHARE_OF_A_RANK = 0.1


class RayCluster:
    """A context manager: inside it there is a Ray session with room for `cluster.world_size` ranks.

    With RAY_ADDRESS in the environment it joins a cluster that runs; a session that the process already has
    is used and left alone; otherwise it starts a local one, which only this machine can reach, and ends it.

    more_cpus: CPUs that other processes than the ranks ask Ray for; a local session then has them.
    fewer: the machines that the recipe allows out of at most so many, when others stay gone; None where it allows none.

    Raises:
        RunStoppedError: the machines have fewer GPUs or nodes than `cluster.*` asks for, nothing answers at
            RAY_ADDRESS, or the local session does not come up.

    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        ready_timeout_s: float = 120,
        more_cpus: float = 0.0,
        fewer: Callable[[int], ClusterConfig | None] | None = None,
    ) -> None:
        self.config = config
        """The machines that ranks are placed on; fewer than at first, where some stayed gone."""
        self._fewer, self._more_cpus = fewer, math.ceil(more_cpus)
        self._address = os.environ.get("RAY_ADDRESS")
        self._ready_timeout_s = ready_timeout_s
        self._session: LocalSession | None = None  # if it was started here
        self._joined = False
        self._is_local = self._address is None and config.num_nodes == 1
        self._gcs: GcsProbe | None = None
        self.log_dir: Path | None = None
        """Folder of the workers' standard error, when they run on this machine."""

    def __enter__(self) -> Self:
        """Start or join the session."""
        try:
            self._start()
            self._check_resources()
        except BaseException:
            self.stop(keep_logs=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop what `__enter__` started."""
        self.stop(keep_logs=isinstance(error, Exception))

    def shared_with(
        self, config: ClusterConfig, *, fewer: Callable[[int], ClusterConfig | None] | None = None
    ) -> RayCluster:
        """Return the same session, with places for the ranks of another recipe; it is this one that ends it.

        Raises RunStoppedError as the class does.
        """
        other = RayCluster(config, ready_timeout_s=self._ready_timeout_s, fewer=fewer)
        other._session, other._gcs, other._is_local = self._session, self._gcs, self._is_local
        other.log_dir = self.log_dir
        other._check_resources()
        return other

    def stop(self, *, keep_logs: bool = False) -> None:
        """End the local session with all its processes, or leave the cluster; idempotent."""
        # A second Ctrl-C must not leave half of the session behind.
        with deferred_stop_signals(hold=True):
            if self._session is not None:
                self._session.end(keep_logs=keep_logs)
            elif self._joined and ray.is_initialized():
                ray.shutdown()
        self._session, self._joined = None, False

    def lost(self) -> str | None:
        """Return what of Ray itself has died, without which no rank can be reached; None while all is well."""
        if self._session is not None:
            return self._session.lost()
        return self._gcs.lost() if self._gcs is not None else None

    def process_state(self, identity: RankIdentity | None) -> str:
        """Return what the system says of a rank's process, as the end of a sentence; empty for other machines."""
        if identity is None or self._session is None:
            return ""
        state = state_of(identity.pid)
        return ": its process is gone" if state == "gone" else f": its process is {state}"

    def lost_node(self, identity: RankIdentity | None) -> str | None:
        """Return the machine of a rank, if it is gone; of a local session that is never all that is."""
        return self.lost_nodes([identity.node_id]).get(identity.node_id) if identity is not None else None

    def lost_nodes(self, ids: Collection[str]) -> dict[str, str]:
        """Return those of the machines that are gone, by their id in Ray: how to call each of them."""
        known = [node for node in ids if node]
        return lost_nodes(known) if known and self._session is None else {}

    def await_machines(self) -> None:
        """Wait until there is room for all ranks, `cluster.node_wait_s` at most; then make do with fewer machines.

        Raises RunStoppedError where that time passes and the recipe allows no fewer.
        """
        wanted, waited_s = self.config.num_nodes, self.config.node_wait_s
        if self._is_local or (found := await_nodes(wanted, self._share_of_a_node, waited_s)) == wanted:
            return
        told = (
            f"{found} of {wanted} machines (cluster.num_nodes) have room for {self.config.workers_per_node} rank(s) "
            f"each, {waited_s:g} s after they were asked for (cluster.node_wait_s)"
        )
        fewer = self._fewer(found) if self._fewer is not None and found else None
        if fewer is None:
            shrinks = self.config.elastic == "shrink"
            why = "the recipe allows no fewer" if shrinks else "cluster.elastic: none needs all of them"
            raise RunStoppedError(
                f"{told}; {why}. With these machines back, or others in their place, it can go on",
                code="missing-machines",
            )
        write_line(
            sys.stderr,
            f"{told}; going on with {fewer.num_nodes} (cluster.elastic: shrink): with fewer copies of the model, "
            "results are no longer equal to the bit",
        )
        self.config = fewer

    def kill(self, actor: Any, identity: RankIdentity | None) -> None:
        """End a rank at once."""
        if self._session is not None and identity is not None:
            self._session.kill(identity.pid)  # also one that is stopped, which does not hear Ray
        if ray.is_initialized() and self.lost() is None:
            ray.kill(actor, no_restart=True)

    def place_ranks(self) -> Placement:
        """Choose the rendezvous of one worker group and a slot for each of its ranks."""
        group = self._reserve(self._share_of_a_node, self.config.num_nodes) if self._spreads else None
        return Placement(self._slots(group), group)

    def place_colocated(self, ranks: Placement, gpus: Sequence[str]) -> Placement:
        """Place a further worker group on the machines of another and, where these have some, on its GPUs, by rank."""
        slots = self._slots(ranks.group)
        if ranks.group is None:
            return Placement(slots)
        shared = {"num_cpus": 0, "num_gpus": 0}  # Ray has given them to the other group
        seen = [
            {} if self.config.on_cpu else {"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus or [""] * len(slots)
        ]
        return Placement(
            tuple(
                RankSlot(slot.rank, {**slot.environment, **gpu}, {**slot.options, **shared})
                for slot, gpu in zip(slots, seen, strict=True)
            )
        )

    def _slots(self, group: PlacementGroup | None) -> tuple[RankSlot, ...]:
        address = LOOPBACK if self._is_local else self.address_of(group)
        rendezvous = {"MASTER_ADDR": address, **self.local_network()}  # the port is what rank 0 finds free
        return tuple(self._slot(rank, rendezvous, group) for rank in range(self.config.world_size))

    def local_network(self) -> dict[str, str]:
        """Environment that keeps process groups inside this machine, when the session is."""
        # A laptop's host name need not resolve; gloo would ask for it.
        return {"GLOO_SOCKET_IFNAME": "lo"} if self._is_local else {}

    def address_of(self, group: PlacementGroup | None, bundle: int = 0) -> str:
        """Return the address of the machine that a bundle is on, or of this one without a group, to meet there."""
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        if group is None:
            return nodes[ray.get_runtime_context().get_node_id()]
        return nodes[ray.util.placement_group_table(group)["bundles_to_node_id"][bundle]]

    @property
    def one_machine(self) -> bool:
        """Return whether all processes of the session are on this machine."""
        return self._is_local

    @property
    def _spreads(self) -> bool:
        """Return whether ranks are given their machines by name; one machine has CPUs for all of them."""
        return not (self.config.on_cpu and self._is_local)

    @property
    def _share_of_a_node(self) -> dict[str, float]:
        """Return what the ranks of one machine take of it."""
        ranks = self.config.workers_per_node
        if self.config.on_cpu:
            return {"CPU": round(ranks * _CPU_SHARE_OF_A_RANK, 4)}
        return {"GPU": ranks, "CPU": ranks}

    def _start(self) -> None:
        if ray.is_initialized():
            address = ray.get_runtime_context().gcs_address
            self._is_local = address.startswith(LOOPBACK) and self.config.num_nodes == 1
            self._gcs = GcsProbe(address)
            return
        if not self._address and self.config.num_nodes > 1:
            raise RunStoppedError(
                f"cluster.num_nodes={self.config.num_nodes} needs a Ray cluster that runs: start one with "
                "`ray start` on every machine and set RAY_ADDRESS, or set cluster.num_nodes to 1",
                code="no-cluster",
            )
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._address:
            self._join(self._address, quiet)
            return
        try:
            self._start_session(quiet)
        except RayletDiedError as error:  # as on a busy machine, where its agents come too late for it
            write_line(sys.stderr, f"{error}\nStarting another session, once")
            self.stop(keep_logs=True)
            self._start_session(quiet)

    def _start_session(self, quiet: Mapping[str, Any]) -> None:
        self._session = LocalSession()
        cpus = max(2, self.config.world_size) + self._more_cpus
        self._session.start(cpus=cpus, on_cpu=self.config.on_cpu, quiet=quiet)
        self.log_dir = self._session.log_dir

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
        self._gcs = GcsProbe(ray.get_runtime_context().gcs_address)
        self.log_dir = Path(context.address_info["session_dir"]) / "logs"

    def _check_resources(self) -> None:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if self.config.on_cpu:
            self._check_machines(nodes)
            return
        fitting = sum(node.get("GPU", 0) >= self.config.gpus_per_node for node in nodes)
        if fitting < self.config.num_nodes:
            found = ", ".join(f"{node.get('GPU', 0):.0f}" for node in nodes)
            raise RunStoppedError(
                f"cluster.num_nodes={self.config.num_nodes} with cluster.gpus_per_node="
                f"{self.config.gpus_per_node} does not fit: the machines that Ray sees have [{found}] GPUs; "
                "lower one of the two keys, or add machines",
                code="missing-gpus",
            )

    def _check_machines(self, nodes: Sequence[Mapping[str, float]]) -> None:
        cpus = self._share_of_a_node["CPU"]
        fitting = sum(node.get("CPU", 0) >= cpus for node in nodes)
        if fitting < self.config.num_nodes:
            raise RunStoppedError(
                f"cluster.num_nodes={self.config.num_nodes} does not fit: Ray sees {fitting} machines with "
                f"{cpus:g} CPUs, which the ranks of one take; lower it, or add machines",
                code="missing-machines",
            )

    def reserve_gpus(self, per_node: int, nodes: int) -> PlacementGroup:
        """GPUs, with a CPU each, on so many machines; raises RunStoppedError when they do not become free."""
        return self._reserve({"GPU": per_node, "CPU": per_node}, nodes)

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

    def _slot(self, rank: int, rendezvous: Mapping[str, str], group: PlacementGroup | None) -> RankSlot:
        node, local_rank = divmod(rank, self.config.workers_per_node)
        # Ray shows a rank only its own GPU, which therefore is device 0.
        identity = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.config.world_size),
            "LOCAL_RANK": str(local_rank if self.config.on_cpu else 0),
        }
        options: dict[str, Any] = {"num_cpus": _CPU_SHARE_OF_A_RANK, "num_gpus": 0}
        if group is not None:
            bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
            resources = options if self.config.on_cpu else {"num_cpus": 1, "num_gpus": 1}
            options = {**resources, "scheduling_strategy": bundle}
        inherited = rank_environment(os.environ, on_cpu=self.config.on_cpu)
        return RankSlot(rank, {**rendezvous, **inherited, **identity}, options)
