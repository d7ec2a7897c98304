"""The tensors of a rank's chunks; and whole parameters, where an optimizer step left them to the next forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model


def weights_of(chunks: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the parameters of each chunk, then its buffers: the bias of experts is one, and training moves it."""
    for chunk in chunks:
        model = cast(torch.nn.Module, unwrap_model(chunk))
        yield from (*model.parameters(), *model.buffers())


def gather_parameters(chunks: Iterable[torch.nn.Module]) -> None:
    """Gather now what `overlap_param_gather` leaves to the next forward pass; data-parallel ranks call it together.

    Whoever reads parameters other than by a forward pass would otherwise find some of the last step's.
    """
    for chunk in chunks:
        # A frozen model has no steps that leave something.
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
