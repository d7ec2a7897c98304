"""Where processes meet: stores that listen on one interface, and the group of all ranks that waits with patience."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.rank import accelerator

PATIENCE = timedelta(days=1)
"""How long ranks wait for each other where a healthy one may be long: starting, reading and writing files, engines.

Nothing of a run is to end by it. Whoever started the ranks watches them, and ends a call that makes no progress.
"""
LISTENING_SOCKET = "MASTER_LISTEN_FD"

_patient: dist.ProcessGroup | None = None
_background: dist.ProcessGroup | None = None


def join() -> None:
    """Join the process group of all ranks, named by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Rank 0 listens at MASTER_ADDR alone, on the socket whose file descriptor MASTER_LISTEN_FD names, if it does.
    The group waits for late ranks, and in its collectives, with patience. Nothing to do for a process that has joined.
    Raises RunStoppedError when rank 0 cannot listen there.
    """
    global _patient
    if dist.is_initialized():
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _stay_on_loopback(address)
    # torchrun's agent holds the store itself.
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listening = None
    if not rank and not of_agent:
        inherited = os.environ.pop(LISTENING_SOCKET, None)  # it is held once
        listening = listen_at(address, port) if inherited is None else socket.socket(fileno=int(inherited))
    meeting = store(address, port, world_size, PATIENCE, listening)
    backend = "nccl" if accelerator.has_cuda() else "gloo"
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world_size, timeout=PATIENCE)
    if backend != "gloo":
        # Ranks that wait for a file are not to keep their GPUs spinning.
        _patient = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=PATIENCE))


def join_alone() -> None:
    """Open a process group of this process alone, wherever RANK says that it stands among others."""
    _stay_on_loopback("localhost")
    backend = "nccl" if accelerator.has_cuda() else "gloo"
    alone = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=PATIENCE)


def leave() -> None:
    """Leave all process groups."""
    global _patient, _background
    _patient = _background = None
    if dist.is_initialized():
        dist.destroy_process_group()


def patient_group() -> dist.ProcessGroup | None:
    """Return all ranks, over gloo, with patience: for waits that may be long. None: the default group is like that."""
    return _patient


def background_group() -> dist.ProcessGroup:
    """Return all ranks, over gloo, with patience, for a background thread of each; collective the first time.

    Collectives of two threads in one group would meet each other's.
    """
    global _background
    if _background is None:
        _background = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=PATIENCE))
    return _background


def store(
    address: str, port: int, world_size: int, timeout: timedelta, listening: socket.socket | None
) -> Any:
    """Open the key-value store where processes meet; who brings the listening socket holds it, others connect."""
    # Left to itself, torch listens on every interface.
    held = {} if listening is None else {"is_master": True, "master_listen_fd": listening.detach()}
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address, port, world_size, timeout=timeout, wait_for_workers=False, **held
    )


def listen_at(address: str, port: int = 0) -> socket.socket:
    """Listen at a port of this machine's address, and on no other interface; 0 is any free one.

    Raises RunStoppedError when that cannot be had.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=1024)  # type: ignore[arg-type]
    except OSError as error:
        raise RunStoppedError(
            f"rank 0 cannot listen at MASTER_ADDR={address}, port {port} ({error}); it is to be an address of rank 0's "
            "own machine, and the port a free one"
        ) from error


def give_up_port() -> None:
    """Free the port where processes are to meet, if this one holds it: for a library that listens there itself."""
    if (inherited := os.environ.pop(LISTENING_SOCKET, None)) is not None:
        os.close(int(inherited))


def _stay_on_loopback(address: str) -> None:
    """Keep the ranks' own connections where the store is: gloo would listen where this machine's name points to."""
    if address in ("localhost", "::1") or address.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
