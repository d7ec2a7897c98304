"""Whole parameters: those that an optimizer step has left to be gathered by the next forward pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.distributed import DistributedDataParallel


def gather_parameters(chunks: Iterable[torch.nn.Module]) -> None:
    """Gather now what `overlap_param_gather` leaves to the next forward pass; data-parallel ranks call it together.

    Whoever reads parameters other than by a forward pass would otherwise find some of the last step's.
    """
    for chunk in chunks:
        # A frozen model has no steps that leave something.
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
