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
patient_group: dist.ProcessGroup | None = None
"""The gloo group of all ranks with that timeout; None if the default group is one."""


def join(*, alone: bool = False) -> None:
    """Join the process group of all ranks, named by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, unless it exists.

    Rank 0 listens only at MASTER_ADDR, on the socket MASTER_LISTEN_FD if that is set; RunStoppedError if it cannot.
    alone: create a group with this process as its only rank, whatever RANK is.
    """
    global patient_group
    if dist.is_initialized() and not alone:
        return
    backend = "nccl" if accelerator.has_cuda() else "gloo"
    address = "localhost" if alone else os.environ["MASTER_ADDR"]
    if address in ("localhost", "::1") or address.startswith("127."):
        # The connections' default is the address of this machine's host name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if alone:
        own = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=own, rank=0, world_size=1, timeout=PATIENCE)
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port, listening = int(os.environ["MASTER_PORT"]), None
    # Under torchrun the agent hosts the store.
    if not rank and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        inherited = os.environ.pop(LISTENING_SOCKET, None)  # only one process may own it
        listening = listen_at(address, port) if inherited is None else socket.socket(fileno=int(inherited))
    meeting = store(address, port, world_size, PATIENCE, listening)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world_size, timeout=PATIENCE)
    if backend != "gloo":
        # Over gloo, so that ranks that wait for a file do not keep their GPUs spinning.
        patient_group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=PATIENCE))


def leave() -> None:
    global patient_group
    patient_group = None
    if dist.is_initialized():
        dist.destroy_process_group()


def store(
    address: str, port: int, world_size: int, timeout: timedelta, listening: socket.socket | None
) -> Any:
    """Open a rendezvous's key-value store; the owner of the listening socket hosts it, others connect."""
    # With a socket of its own, torch would listen on every interface.
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
            f"rank 0 cannot listen at MASTER_ADDR={address}, port {port} ({error}); use an address of rank 0's machine "
            "and a free port"
        ) from error
