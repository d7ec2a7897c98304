"""The reference policy: the policy's weights at the start, lent to the model for one pass at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.config.policy import REFERENCE_SHARE
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron.optimizer_state import gather_parameters, weights_of

PIECE_BYTES = 16 * 2**20  # long beside the start of a copy, small beside the weights
_SPARES = 2  # one is filled while the other is emptied


class ReferencePolicy:
    """The rank's first weights, on the device or in page-locked CPU memory, swapped with the policy's own when used."""

    def __init__(self, chunks: Sequence[torch.nn.Module], *, on_device: bool):
        self._chunks = chunks
        self.on_device = on_device
        for chunk in chunks:
            # Asked for its state a router widens its experts' bias, which it would else do in its first pass.
            chunk.state_dict()
        place = None if on_device else "cpu"
        pinned = not on_device and accelerator.has_cuda()
        self._kept = [torch.empty_like(piece, device=place, pin_memory=pinned) for piece in self._pieces()]
        self.keep()

    def keep(self) -> None:
        """Be the model's present weights from now on; data-parallel ranks call it together."""
        gather_parameters(self._chunks)
        for kept, piece in zip(self._kept, self._pieces(), strict=True):
            kept.copy_(piece)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Use the reference weights inside the block; data-parallel ranks enter it together."""
        gather_parameters(self._chunks)
        # Taken before the pass: one that ends for want of memory must not lack it on the way out.
        spares = [
            torch.empty(PIECE_BYTES, dtype=torch.uint8, device=accelerator.device()) for _ in range(_SPARES)
        ]
        self._exchange(spares)
        try:
            yield
        finally:
            self._exchange(spares)

    def _pieces(self) -> Iterator[torch.Tensor]:
        """Yield the memory of all weights in place, as uint8 [at most PIECE_BYTES], to be copied bit for bit."""
        for weight in weights_of(self._chunks):
            yield from weight.detach().view(-1).view(torch.uint8).split(PIECE_BYTES)

    def _exchange(self, spares: Sequence[torch.Tensor]) -> None:
        """Swap the model's weights with those that are kept; one piece leaves while the next one comes."""
        coming, leaving = accelerator.current_stream(), accelerator.new_stream()
        emptied = [leaving.record_event() for _ in spares]
        for number, (piece, kept) in enumerate(zip(self._pieces(), self._kept, strict=True)):
            turn = number % len(spares)
            spare = spares[turn][: piece.numel()]
            coming.wait_event(emptied[turn])
            spare.copy_(piece)
            piece.copy_(kept, non_blocking=True)
            leaving.wait_stream(coming)
            with accelerator.on_stream(leaving):
                kept.copy_(spare, non_blocking=True)
            emptied[turn] = leaving.record_event()
        coming.wait_stream(leaving)


ON_DEVICE: bool | None = None
"""Place of the reference, whatever room there is; None depends on the room."""


def is_kept_on_device(policy: PolicyConfig, chunks: Sequence[torch.nn.Module]) -> bool:
    """Return whether this rank keeps its reference on its device: where there is room, and no engine beside it."""
    if ON_DEVICE is not None:
        return ON_DEVICE
    free = accelerator.free_memory_bytes()
    if free is None:
        return True
    room = REFERENCE_SHARE * free
    return not policy.generation.takes_turns and sum(weight.nbytes for weight in weights_of(chunks)) <= room
