"""The placement of a run's processes, and their environment variables; does not import Ray.

Processes receive an allow-list of variables, never the driver's whole environment. A local Ray session passes the
environment of `ray.init` to all its processes, and a runtime environment can only extend it. So the session starts
under `only_environment(session_environment(...))`, and each rank's variables are added.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Generator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_rl_mcore.errors import RunStoppedError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from nemo_rl_mcore.config.environment import EnvPoolConfig

# Variables from the machine that runs the process. Not PYTHONDONTWRITEBYTECODE: with cached bytecode a worker imports
# Megatron in less than half of the time.
_MACHINE_NAMES = {
    *("PATH", "HOME", "USER", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"),
    *("LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV", "XDG_CACHE_HOME"),
    *("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
}
# Settings of a rank on any machine.
_RANK_NAMES = {
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG"),
    *("GLOO_SOCKET_IFNAME", "TRITON_CACHE_DIR", "MKL_NUM_THREADS", "PYTHONFAULTHANDLER", "PYTHONWARNINGS"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM"),
}
_RANK_PREFIXES = ("NCCL_", "NVTE_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "MEGATRON_")

HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")

# With 1 (Ray's default on Linux), a local session listens on every network; with 0, only on the loopback interface.
LISTEN_ON_ALL_INTERFACES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def set_ray_import_switches(environ: MutableMapping[str, str]) -> None:
    # Ray prints these on the driver's terminal despite its log settings; a `WorkerError` describes them better.
    notices = "A worker died or was killed while executing a task|Raylet is terminated|has been marked dead"
    environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", notices)
    if not environ.get("RAY_ADDRESS"):
        environ.setdefault(LISTEN_ON_ALL_INTERFACES, "0")
        # With 1 (Ray's default), Ray packs the folder of a driver under `uv run` and builds an environment for every
        # worker. On one machine the workers can use the driver's environment.
        environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")


def _kept(environ: Mapping[str, str], names: Collection[str], prefixes: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name in names or name.startswith(prefixes)}


def session_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables inherited by a local Ray session's processes, with Ray's settings."""
    names = _MACHINE_NAMES | _RANK_NAMES
    return {
        **_kept(environ, names, (*_RANK_PREFIXES, "RAY_")),
        "RAY_USAGE_STATS_ENABLED": "0",
        # We set CUDA_VISIBLE_DEVICES for ranks without a GPU; this also silences Ray's notice about its default.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def rank_environment(environ: Mapping[str, str], *, on_cpu: bool) -> dict[str, str]:
    """Return the variables that a rank inherits from the driver on any machine, with settings for its device."""
    kept = _kept(environ, _RANK_NAMES, _RANK_PREFIXES)
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} if on_cpu else kept


def agent_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return _kept(environ, _MACHINE_NAMES, ()) | {"CUDA_VISIBLE_DEVICES": ""}


def given_variables(config: EnvPoolConfig) -> dict[str, str]:
    """Return the driver's variables for the environment's processes; raise RunStoppedError if one is not set."""
    missing = [name for name in config.variables if name not in os.environ]
    if missing:
        raise RunStoppedError(
            f"env.pool.variables: {missing[0]} is not set where the run was started; export it",
            code="missing-variable",
        )
    return {name: os.environ[name] for name in config.variables}


@contextmanager
def only_environment(environment: Mapping[str, str]) -> Generator[None]:
    saved = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


_ANSWERS_WITHIN_S = 3.0


def probe(address: str) -> bool:
    """Connect to `host:port` and disconnect; raise OSError if nothing answers, ValueError for an invalid port.

    Returns False for any other form of address, such as "auto", which Ray itself checks at once.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return False
    if int(port) not in range(1, 1 << 16):
        raise ValueError(f"no port {port}")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_WITHIN_S).close()
    return True


@dataclass(frozen=True)
class RankSlot:
    """A rank's place, with its environment. options: scheduling options for its Ray actor."""

    rank: int
    environment: Mapping[str, str]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Placement:
    slots: tuple[RankSlot, ...] = ()
    group: PlacementGroup | None = None

    def release(self) -> None:
        """Free the reserved resources; do nothing for CPU ranks on this machine alone."""
        if self.group is None:
            return
        import ray
        from ray.util.placement_group import remove_placement_group

        if ray.is_initialized():
            remove_placement_group(self.group)
