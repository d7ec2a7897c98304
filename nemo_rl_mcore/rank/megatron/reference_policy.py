"""The reference policy: the policy's first weights, swapped into the model for one pass at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron.optimizer_state import gather_parameters, weights_of

PIECE_BYTES = 16 * 2**20  # enough to hide a copy's latency, small in comparison with the weights
_SPARES = 2  # one is filled while the other is emptied
ON_DEVICE: bool | None = None
"""True or false places the reference on the device or not, regardless of the room there; None: by the room."""


class ReferencePolicy:
    """The rank's first weights, on the device or in page-locked CPU memory."""

    def __init__(self, chunks: Sequence[torch.nn.Module], *, on_device: bool):
        self._chunks = chunks
        self.on_device = on_device
        for chunk in chunks:
            # Makes a router convert its experts' bias to fp32 now instead of in its first pass.
            chunk.state_dict()
        place = None if on_device else "cpu"
        pinned = not on_device and accelerator.has_cuda()
        self._kept = [torch.empty_like(piece, device=place, pin_memory=pinned) for piece in self._pieces()]
        self.keep()

    def keep(self) -> None:
        """Copy the model's present weights; data-parallel ranks call it together."""
        gather_parameters(self._chunks)
        for kept, piece in zip(self._kept, self._pieces(), strict=True):
            kept.copy_(piece)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Use the reference weights inside the block; data-parallel ranks enter it together."""
        gather_parameters(self._chunks)
        # Allocated before the pass, so that the swap back cannot fail after an out-of-memory error.
        spares = [
            torch.empty(PIECE_BYTES, dtype=torch.uint8, device=accelerator.device()) for _ in range(_SPARES)
        ]
        self._exchange(spares)
        try:
            yield
        finally:
            self._exchange(spares)

    def _pieces(self) -> Iterator[torch.Tensor]:
        """Yield the memory of all weights as views, uint8 [at most PIECE_BYTES]."""
        for weight in weights_of(self._chunks):
            yield from weight.detach().view(-1).view(torch.uint8).split(PIECE_BYTES)

    def _exchange(self, spares: Sequence[torch.Tensor]) -> None:
        """Swap the model's weights and the kept ones; one piece is copied out while the next is copied in."""
        coming, leaving = accelerator.current_and_new_stream()
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
