"""The reference policy: the policy's weights at the start, lent to the model for one pass at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from megatron.core.utils import unwrap_model

from nemo_rl_mcore.megatron.parameters import gather_parameters


class ReferencePolicy:
    """A copy on the CPU of this rank's weights as they were when it was made."""

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        self._chunks = chunks
        self._weights = self._copy_of_weights()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model has the reference weights; the policy's own come back also after an exception."""
        own = self._copy_of_weights()
        try:
            self._load(self._weights)
            yield
        finally:
            self._load(own)

    def _parameters(self) -> list[torch.Tensor]:
        # Buffers too: the bias of experts is one, and training moves it.
        models = [cast(torch.nn.Module, unwrap_model(chunk)) for chunk in self._chunks]
        return [part for model in models for part in (*model.parameters(), *model.buffers())]

    def _copy_of_weights(self) -> list[torch.Tensor]:
        gather_parameters(self._chunks)
        return [parameter.detach().to("cpu", copy=True) for parameter in self._parameters()]

    def _load(self, weights: list[torch.Tensor]) -> None:
        # In place: the parameters are views of Megatron's buckets (distributed/param_and_grad_buffer.py).
        with torch.no_grad():
            for parameter, weight in zip(self._parameters(), weights, strict=True):
                parameter.copy_(weight)
