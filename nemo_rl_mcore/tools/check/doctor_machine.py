"""What this machine gives a run beside GPUs: memory, cores, disk, limits, names and ports."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from nemo_rl_mcore.driver.folders import nearest_folder, try_to_write
from nemo_rl_mcore.tools.check.doctor_children import Answer
from nemo_rl_mcore.tools.check.doctor_findings import Finding, Status, ok

PYTHONS = ((3, 12), (3, 13))
"""Those of `requires-python` in pyproject.toml."""
_GIB = 2**30
_LITTLE_DISK = 1 * _GIB
_LITTLE_SHARED = 256 << 20
"""The object store of a local Ray session with ranks on CPU."""
_FEW_FILES = 4096
"""Below it Ray warns; it raises the soft limit by itself, up to the hard one."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_LOOPBACK = "127.0.0.1"


def memory_bytes() -> int:
    """Return the memory of this machine, or of the container that this process is in."""
    limits = [psutil.virtual_memory().total]
    for file in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no cgroup, or no limit in it
            limits.append(int(Path(file).read_text()))
    return min(limits)


def findings(folders: Mapping[str, Path], host_name: Answer) -> Iterator[Finding]:
    """Yield what there is; folders: those whose disk is looked at, by what they are."""
    yield _python()
    yield ok("cores", f"{len(os.sched_getaffinity(0))}")
    free = min(psutil.virtual_memory().available, memory_bytes())
    yield ok("memory", f"{memory_bytes() / _GIB:.4g} GiB, {free / _GIB:.4g} free")
    yield _shared_memory()
    for name, folder in folders.items():
        yield _disk(name, folder, "logs, rollouts, checkpoints")
    temporary = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    yield _disk("temporary files", temporary, "every run: Ray's files", needed=True)
    yield _open_files()
    yield _loopback()
    yield _host_name(host_name)


def _python() -> Finding:
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}, {sys.executable}"
    if sys.version_info[:2] in PYTHONS and sys.platform == "linux":
        return ok("Python", found)
    return Finding(
        "Python",
        Status.WRONG,
        found,
        "all of it: Python 3.12 or 3.13 on Linux",
        "uv sync --python 3.12",
        True,
    )


def _shared_memory() -> Finding:
    enables = "Ray's object store, weights on their way to engines, NCCL within a machine"
    mend = "start the container with --shm-size=8g, or as root: mount -o remount,size=8g /dev/shm"
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding("/dev/shm", Status.MISSING, str(error.strerror), enables, mend)
    found = f"{usage.total / _GIB:.4g} GiB, {usage.free / _GIB:.4g} free"
    if usage.free < _LITTLE_SHARED:
        return Finding("/dev/shm", Status.WRONG, found, enables, mend)
    return ok("/dev/shm", found)


def _disk(name: str, folder: Path, enables: str, *, needed: bool = False) -> Finding:
    there = nearest_folder(folder)
    try:
        try_to_write(there)
    except OSError as error:
        what = f"{there}: cannot be written to: {error.strerror}"
        return Finding(name, Status.WRONG, what, enables, "make room there, or name another folder", needed)
    free = shutil.disk_usage(there).free
    found = f"{there}: {free / _GIB:.4g} GiB free"
    if free < _LITTLE_DISK:
        return Finding(name, Status.WRONG, found, enables, "make room there, or name another folder")
    return ok(name, found)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = float("inf") if hard == resource.RLIM_INFINITY else hard
    found = f"{soft}, up to {highest:g}" if highest != soft else str(soft)
    if highest < _FEW_FILES:
        mend = f"ulimit -Hn {16 * _FEW_FILES}, as root or in /etc/security/limits.conf"
        return Finding("open files", Status.WRONG, found, "Ray: each of its processes takes some", mend)
    return ok("open files", found)


def _loopback() -> Finding:
    """Return whether processes of this machine can meet; ranks that are started by hand do so at MASTER_PORT."""
    port = os.environ.get("MASTER_PORT", "")
    enables = "every run: its processes meet there"
    try:
        with socket.create_server((_LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=3).close()
    except OSError as error:
        what = f"nothing can listen and be reached there: {error}"
        return Finding(
            _LOOPBACK, Status.WRONG, what, enables, "bring it up, as root: ip link set lo up", True
        )
    if port.isdecimal() and not _can_listen(int(port)):
        what = f"MASTER_PORT={port} is no port that can be listened at"
        return Finding(
            _LOOPBACK, Status.WRONG, what, "ranks started by hand", "unset MASTER_PORT, or name a free one"
        )
    return ok(_LOOPBACK, "ports can be listened at" + (f", {port} among them" if port.isdecimal() else ""))


def _can_listen(port: int) -> bool:
    try:
        socket.create_server((_LOOPBACK, port)).close()
    except (OSError, OverflowError):
        return False
    return True


def _host_name(answer: Answer) -> Finding:
    enables = "runs over several machines: ranks find each other by it; one machine needs it not"
    mend = "add a line with its address and its name to /etc/hosts"
    if answer.failure:
        return Finding("host name", Status.WRONG, answer.failure, enables, mend)
    name, addresses = answer.facts["name"], answer.facts["addresses"]
    if not addresses:
        return Finding("host name", Status.WRONG, f"{name} stands for no address", enables, mend)
    return ok("host name", f"{name}: {', '.join(addresses)}")
