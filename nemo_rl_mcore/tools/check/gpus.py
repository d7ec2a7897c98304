"""The GPUs of this machine, as far as its devices tell, and those that a run wants of it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.run_config import RunConfig

KEY = "cluster.gpus_per_node"
REMEDY = "lower it, run where they are, or set 0 for ranks on CPU"


def visible_gpus() -> int:
    """Return how many GPUs this process may use, found out without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = len([*Path("/dev").glob("nvidia[0-9]*")])
    return there if visible is None else min(there, len([one for one in visible.split(",") if one.strip()]))


def gpu_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield that a run which starts here wants more GPUs than there are.

    Machines of a Ray cluster that is joined are judged by Ray.
    """
    if config.cluster.on_cpu or _joins_ray() or _WITHOUT_DEVICES.exists():
        return
    wanted, there = wanted_gpus(config), visible_gpus()
    if wanted > there:
        what = f"{wanted} GPUs are asked for, and this machine has {there}"
        yield Problem("too-large", KEY, what, REMEDY)


def wanted_gpus(config: RunConfig) -> int:
    """Return the GPUs of one machine that ranks have, and engines apart from them."""
    generation, of_ranks = config.policy.generation, config.cluster.gpus_per_node
    if generation.decodes_on_ranks or generation.colocated.enabled:
        return of_ranks
    return of_ranks + (generation.colocated.resources.gpus_per_node or 0)


def _joins_ray() -> bool:
    """Return whether the run has its ranks in a session that another one has started."""
    ray = sys.modules.get("ray")
    return bool(os.environ.get("RAY_ADDRESS")) or (ray is not None and ray.is_initialized())


_WITHOUT_DEVICES = Path("/dev/dxg")
"""Of Linux inside Windows, which has no device for each GPU."""
