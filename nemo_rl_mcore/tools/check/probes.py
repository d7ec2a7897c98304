"""Probes of this machine, each in its own process, so that it can fail, crash or hang alone.

Each process runs this file as a script. It imports nothing of this package, so that an answer depends only on the
package under test. The answer is one JSON object on standard output; all other output goes to standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any

Facts = dict[str, Any]
Question = tuple[str, ...]
"""A probe's name, and its arguments."""


@dataclass(frozen=True)
class Answer:
    """A process's facts; failure: the reason if some are missing; late: the deadline passed."""

    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    failure: str = ""
    late: bool = False


def ask(questions: Mapping[str, Question], deadline_s: float) -> dict[str, Answer]:
    """Return the answers after at most `deadline_s`; no process is left behind."""
    ends_at = time.monotonic() + deadline_s
    asked: dict[str, tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]] = {}
    with contextlib.ExitStack() as ended:
        # Ctrl-C between a process's start and its registration would leave it behind.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            for key, question in questions.items():
                # Pipes would have to be read; files on disk might not fit: output goes to files in memory.
                files = (os.fdopen(os.memfd_create(name), "w+b") for name in ("out", "err"))
                out, err = (ended.enter_context(file) for file in files)
                # -P: folders in the working directory that are named like a package do not hide it.
                command = [sys.executable, "-P", __file__, str(deadline_s), *question]
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
                )
                ended.callback(_kill, process)
                asked[key] = process, out, err
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        answers = dict[str, Answer]()
        for key, (process, out, err) in asked.items():
            try:
                process.wait(max(0.0, ends_at - time.monotonic()))
                facts: Facts = json.loads(_text(out))
                answers[key] = Answer(facts, facts.pop("failure", ""))
            except subprocess.TimeoutExpired:
                answers[key] = Answer(failure=f"no answer within {deadline_s:g} s (--timeout)", late=True)
            except ValueError:
                status = process.returncode
                how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exits with {status}"
                last = [line.strip() for line in _text(err).splitlines() if line.strip()][-1:]
                answers[key] = Answer(failure=": ".join([f"the process {how}", *last]))
        return answers


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


# In the child


def imports(module: str) -> Facts:
    importlib.import_module(module)
    return {}


def torch() -> Facts:
    """Use each GPU that torch sees; return their names and bytes, torch's build, and its collectives."""
    module: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    facts: Facts = {"cuda": module.version.cuda, "gpus": [], "gloo": dist.is_gloo_available()}
    facts["nccl"] = ".".join(map(str, module.cuda.nccl.version())) if dist.is_nccl_available() else None
    for index in range(module.cuda.device_count()):
        device = module.cuda.get_device_properties(index)
        facts["gpus"].append({"name": device.name, "bytes": device.total_memory})
    try:
        # This fails if the driver is too old, or torch is built for other GPUs.
        for index in range(len(facts["gpus"])):
            module.ones(2, device=f"cuda:{index}").sum().item()
    except RuntimeError as error:
        facts["unusable"] = " ".join(str(error).split())
    return facts


def nvidia_smi() -> Facts:
    """Return name and driver version of each GPU that nvidia-smi lists; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {"listed": None}
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    facts: Facts = {
        "listed": [line.rpartition(", ")[::2] for line in done.stdout.splitlines() if ", " in line]
    }
    if done.returncode:
        facts["failure"] = " ".join((done.stdout + done.stderr).split())
    return facts


def ray_cluster(address: str) -> Facts:
    """Join a Ray cluster, and return the number of GPUs on each of its machines."""
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # pack nothing for workers
    ray: Any = importlib.import_module("ray")
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    return {"gpus": [node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]]}


def host_name() -> Facts:
    """Return this machine's name and addresses; the look-up may wait for a name server."""
    name = socket.gethostname()
    facts: Facts = {"name": name, "addresses": []}
    with contextlib.suppress(OSError):
        facts["addresses"] = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    return facts


_PROBES: dict[str, Callable[..., Facts]] = {
    probe.__name__: probe for probe in (imports, torch, nvidia_smi, ray_cluster, host_name)
}


if __name__ == "__main__":
    signal.alarm(int(float(sys.argv[1])) + 2)  # even if the parent process is killed
    answer = os.dup(1)
    os.dup2(2, 1)

    def write_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = " ".join(str(error).split())
        failure = {"failure": f"{kind.__name__}: {text}" if text else kind.__name__}
        os.write(answer, json.dumps(failure).encode())

    sys.excepthook = write_failure
    os.write(answer, json.dumps(_PROBES[sys.argv[2]](*sys.argv[3:])).encode())
