"""The machines of a Ray cluster: which of them are there, and which have gone.

Ray itself knows of a machine that is gone only after missed health checks (about 14 seconds with its defaults). Its
raylet listens on a port, which tells at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # a developer API, without a public path

from nemo_rl_mcore.driver.actors.gcs_probe import probe
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.signals import current_stop_signals
from nemo_rl_mcore.errors import RunStoppedError

_ID_SHOWN = 8
_LOOK_EVERY_S = 0.2
_TOLD_AFTER_S = 1.0
"""Ray tells of what was given back with a delay."""


def lost_nodes(ids: Collection[str]) -> dict[str, str]:
    """Return those of the machines that are gone, by their id in Ray: how to call each of them."""
    return {
        node["NodeID"]: f"{node['NodeID'][:_ID_SHOWN]} ({node['NodeManagerAddress']})"
        for node in ray.nodes()
        if node["NodeID"] in ids and (not node["Alive"] or _refuses(node))
    }


def await_nodes(wanted: int, needed: Mapping[str, float], within_s: float) -> int:
    """Return how many machines have so much of each resource free: as many as are wanted, or fewer after so long."""
    start, told = time.monotonic(), False
    while (found := _with_room(needed)) < wanted and (waited_s := time.monotonic() - start) < within_s:
        if waited_s > _TOLD_AFTER_S and not told:
            told = True
            what = f"waiting for {wanted - found} of {wanted} machines (cluster.num_nodes)"
            write_line(sys.stderr, f"{what}, {within_s:g} s at most (cluster.node_wait_s)")
        signals = current_stop_signals()
        signals.stop_if_asked()
        if (
            signals.asked or signals.time_is_up
        ):  # where signals wait for a block to end, this is too long for them
            raise RunStoppedError("the run was to stop while it waited for machines")
        time.sleep(_LOOK_EVERY_S)
    return min(found, wanted)


def _with_room(needed: Mapping[str, float]) -> int:
    """Return the number of machines that are there with so much of each resource free."""
    free = available_resources_per_node()
    return sum(
        _is_there(node)
        for node in ray.nodes()
        if all(free.get(node["NodeID"], {}).get(name, 0.0) >= amount for name, amount in needed.items())
    )


def _refuses(node: Mapping[str, Any]) -> bool:
    """Return whether nobody listens for a machine; one that is only slow to answer is for Ray to judge."""
    try:
        _probe(node)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _probe(node: Mapping[str, Any]) -> None:
    probe(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")


def _is_there(node: Mapping[str, Any]) -> bool:
    if not node["Alive"]:
        return False
    try:
        _probe(node)
    except OSError:
        return False
    return True
