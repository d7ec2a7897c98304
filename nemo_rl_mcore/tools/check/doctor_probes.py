"""A script that asks one question of this machine, in a process of its own that may fail, crash or hang.

It stands alone: nothing of the package is imported, so that its answer is about the package asked for. The answer is
one JSON object on standard output; whatever else is printed meanwhile goes to standard error.
"""

import contextlib
import ctypes
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

Facts = dict[str, Any]


def imports(module: str) -> Facts:
    """Import a module."""
    importlib.import_module(module)
    return {}


def torch() -> Facts:
    """Return what torch is built for, and the GPUs that it sees: their names, bytes and compute capabilities."""
    module: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    cuda = module.cuda
    properties = [cuda.get_device_properties(index) for index in range(cuda.device_count())]
    nccl = dist.is_nccl_available()
    return {
        "cuda": module.version.cuda,
        "gpus": [
            {"name": one.name, "bytes": one.total_memory, "capability": [one.major, one.minor]}
            for one in properties
        ],
        "architectures": cuda.get_arch_list() if properties else [],
        "nccl": ".".join(map(str, cuda.nccl.version())) if nccl else None,
        "gloo": dist.is_gloo_available(),
    }


def driver() -> Facts:
    """NVIDIA's driver: the newest CUDA that it knows; names of the GPUs that nvidia-smi lists, and its version."""
    facts: Facts = {"cuda": None, "listed": None}
    with contextlib.suppress(OSError):
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            facts["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    if shutil.which("nvidia-smi") is not None:
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        facts["listed"] = [line.rpartition(", ")[::2] for line in done.stdout.splitlines() if ", " in line]
        if done.returncode:
            facts["failure"] = " ".join((done.stdout + done.stderr).split())
    return facts


def ray_cluster(address: str) -> Facts:
    """Join a Ray cluster and leave it: the GPUs and CPUs of each of its machines."""
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # nothing is to be packed for workers
    ray: Any = importlib.import_module("ray")
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return {"machines": [{"gpus": one.get("GPU", 0), "cpus": one.get("CPU", 0)} for one in machines]}


def host_name() -> Facts:
    """Return the name of this machine, and its addresses; asking for them may wait for a name server."""
    name = socket.gethostname()
    facts: Facts = {"name": name, "addresses": []}
    with contextlib.suppress(OSError):
        facts["addresses"] = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    return facts


_PROBES: dict[str, Callable[..., Facts]] = {
    probe.__name__: probe for probe in (imports, torch, driver, ray_cluster, host_name)
}


def _main(deadline_s: str, name: str, *arguments: str) -> None:
    signal.alarm(int(float(deadline_s)) + 2)  # also where whoever asks is killed
    answer = os.dup(1)
    os.dup2(2, 1)

    def tell_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        told = " ".join(str(error).split())
        _tell(answer, {"failure": f"{kind.__name__}: {told}" if told else kind.__name__})

    sys.excepthook = tell_failure
    _tell(answer, _PROBES[name](*arguments))


def _tell(answer: int, facts: Facts) -> None:
    os.write(answer, json.dumps(facts).encode())


if __name__ == "__main__":
    _main(*sys.argv[1:])
