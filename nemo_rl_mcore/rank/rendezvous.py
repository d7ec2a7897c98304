"""Rendezvous of processes: key-value stores bound to one interface, and process groups with a long timeout."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.rank import accelerator

PATIENCE = timedelta(days=1)
"""Timeout where a healthy rank may be slow: at start, reading and writing files, waiting for engines.

It should never expire: the process that started the ranks ends a call that makes no progress.
"""
LISTENING_SOCKET = "MASTER_LISTEN_FD"

_patient: dist.ProcessGroup | None = None
_background: dist.ProcessGroup | None = None


def join() -> None:
    """Join the process group of all ranks, named by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, unless it has.

    Rank 0 listens only at MASTER_ADDR, on the socket MASTER_LISTEN_FD if that is set; RunStoppedError if it cannot.
    """
    global _patient
    if dist.is_initialized():
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _stay_on_loopback(address)
    # Under torchrun the agent hosts the store.
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listening = None
    if not rank and not of_agent:
        inherited = os.environ.pop(LISTENING_SOCKET, None)  # only one process may own it
        listening = listen_at(address, port) if inherited is None else socket.socket(fileno=int(inherited))
    meeting = store(address, port, world_size, PATIENCE, listening)
    backend = "nccl" if accelerator.has_cuda() else "gloo"
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world_size, timeout=PATIENCE)
    if backend != "gloo":
        # Over gloo, so that ranks that wait for a file do not keep their GPUs spinning.
        _patient = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=PATIENCE))


def join_alone() -> None:
    """Create a process group with this process as its only rank, whatever RANK is."""
    _stay_on_loopback("localhost")
    backend = "nccl" if accelerator.has_cuda() else "gloo"
    alone = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=PATIENCE)


def leave() -> None:
    global _patient, _background
    _patient = _background = None
    if dist.is_initialized():
        dist.destroy_process_group()


def patient_group() -> dist.ProcessGroup | None:
    """Return the gloo group of all ranks with the long timeout; None where the default group is already that."""
    return _patient


def background_group() -> dist.ProcessGroup:
    """Return a second group like `patient_group`, for another thread on each rank; its first call is collective."""
    global _background
    if _background is None:
        _background = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=PATIENCE))
    return _background


def store(
    address: str, port: int, world_size: int, timeout: timedelta, listening: socket.socket | None
) -> Any:
    """Open the key-value store of a rendezvous; the owner of the listening socket hosts it, others connect."""
    # Without a socket of ours, torch would listen on every interface.
    held = {} if listening is None else {"is_master": True, "master_listen_fd": listening.detach()}
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address, port, world_size, timeout=timeout, wait_for_workers=False, **held
    )


def listen_at(address: str, port: int = 0) -> socket.socket:
    """Listen at this address only, at a free port for 0; RunStoppedError if either is not available."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=1024)  # type: ignore[arg-type]
    except OSError as error:
        raise RunStoppedError(
            f"rank 0 cannot listen at MASTER_ADDR={address}, port {port} ({error}); it is to be an address of rank 0's "
            "own machine, and the port a free one"
        ) from error


def give_up_port() -> None:
    """Close the inherited listening socket, if any, for a library that opens the port itself."""
    if (inherited := os.environ.pop(LISTENING_SOCKET, None)) is not None:
        os.close(int(inherited))


def _stay_on_loopback(address: str) -> None:
    """Bind gloo's connections to the interface of the store; its default is the address of this machine's host name."""
    if address in ("localhost", "::1") or address.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
