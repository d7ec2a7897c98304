"""What of a model waits in the CPU's memory while others need its device.

Megatron frees its gradient buffers itself. Its call for the optimizer gives every tensor new memory, which in float32
are the weights, and that for the weights knows those of the distributed optimizer alone. So these are moved here, below
the tensors: whoever views a storage, such as a shard of a bucket, finds it filled again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron.optimizer_state import parts_of, weights_of
from nemo_rl_mcore.rank.policy_backend import OnDevice


class Offload:
    """Keeps on the device what is asked for, of the weights, the gradients and what the optimizer has beside these.

    wrapped: the chunks that are trained, empty for a model without an optimizer.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        wrapped: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer | None,
    ):
        self._chunks, self._wrapped, self._optimizer = chunks, wrapped, optimizer
        self._weights, self._state = _Shelf(), _Shelf()
        self._present: OnDevice | None = OnDevice.EVERYTHING

    def keep(self, wanted: OnDevice) -> None:
        """See `PolicyBackend.keep_on_device`; what a call that failed has left is moved by the next one."""
        if self._present is wanted:
            return
        self._present = None
        if wanted is not OnDevice.EVERYTHING:
            self._put_away_state()
        if wanted is OnDevice.NOTHING:
            self._weights.put_away(weights_of(self._chunks))
        else:
            self._weights.bring_back()
        if wanted is OnDevice.EVERYTHING:
            self._bring_back_state()
        else:
            accelerator.empty_cache()  # others are to have it
        self._present = wanted

    def _put_away_state(self) -> None:
        if self._optimizer is None:
            return
        self._optimizer.zero_grad()  # gradients of main weights may have memory of their own
        of_model = {_address(tensor) for tensor in weights_of(self._chunks)}
        self._state.put_away(
            tensor for tensor in _tensors_of(self._optimizer) if _address(tensor) not in of_model
        )
        with _without_storage_notice():
            for chunk in self._wrapped:
                chunk.offload_grad_buffers(empty_cache=False)

    def _bring_back_state(self) -> None:
        self._state.bring_back()
        with _without_storage_notice():
            for chunk in self._wrapped:
                chunk.restore_grad_buffers()


class _Shelf:
    """The contents of storages without memory, page-locked meanwhile; torch keeps such memory for the next time."""

    def __init__(self) -> None:
        self._contents: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def put_away(self, tensors: Iterable[torch.Tensor]) -> None:
        device = accelerator.device()
        storages = {
            _address(tensor): tensor.untyped_storage() for tensor in tensors if tensor.device == device
        }
        taken = [(storage, _copy_on_cpu(storage)) for storage in storages.values() if storage.nbytes()]
        accelerator.synchronize(device)
        for storage, contents in taken:
            self._contents.append((storage, contents))
            storage.resize_(0)

    def bring_back(self) -> None:
        while self._contents:  # for want of memory it may end half-way, and be called again
            storage, contents = self._contents[-1]
            storage.resize_(contents.numel())
            _bytes_of(storage).copy_(contents)
            self._contents.pop()


def _tensors_of(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Yield main weights and moments."""
    for part in parts_of(optimizer):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view, uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy_on_cpu(storage: torch.UntypedStorage) -> torch.Tensor:
    contents = torch.empty(
        storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=accelerator.has_cuda()
    )
    return contents.copy_(_bytes_of(storage), non_blocking=True)


def _without_storage_notice() -> warnings.catch_warnings[None]:
    """Megatron asks for a buffer's storage in a way that torch says it will drop."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
