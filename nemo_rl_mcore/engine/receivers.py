"""What an engine's process needs of every transport: its end of each, opened when the first bucket comes that way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_mcore.rank.refit.buckets import Bucket
from nemo_rl_mcore.rank.refit.transports import (
    BroadcastReceiver,
    CudaIpcReceiver,
    MessageReceiver,
    ReceivingEnd,
    SharedMemoryReceiver,
    join_broadcast_group,
)


class Receivers:
    """The ends of all transports of one process; `device` is what its model is on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[str, ReceivingEnd] = {}
        self._group: dist.ProcessGroup | None = None

    def join_broadcast(self, address: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        """Join the group in which the trainer's rank 0 broadcasts, in place of the one before."""
        if (end := self._open.pop("broadcast", None)) is not None:
            end.close()
        timeout = timedelta(seconds=timeout_s)
        self._group = join_broadcast_group(address, port, rank, world_size, timeout, self._device.type)

    def read(self, message: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of each in the bucket, as views that are valid until the bucket is acknowledged."""
        bucket = Bucket.from_message(message)
        yield from bucket.read(self._end(bucket.location["kind"]).open(bucket.location))

    def close(self) -> None:
        """Forget the sender's buffers."""
        for end in self._open.values():
            end.close()
        self._open.clear()

    def _end(self, kind: str) -> ReceivingEnd:
        if kind not in self._open:
            self._open[kind] = self._opened(kind)
        return self._open[kind]

    def _opened(self, kind: str) -> ReceivingEnd:
        match kind:
            case "shared_memory":
                return SharedMemoryReceiver()
            case "cuda_ipc":
                return CudaIpcReceiver(self._device)
            case "message":
                return MessageReceiver()
            case "broadcast":
                assert self._group is not None
                return BroadcastReceiver(self._device, self._group)
            case _:
                raise ValueError(f"this engine has no end of the transport {kind!r}")
