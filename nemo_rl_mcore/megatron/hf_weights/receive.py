"""Weights that come tensor by tensor, in any order, to a process that holds the whole model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nemo_rl_mcore.config import ModelConfig
from nemo_rl_mcore.megatron.hf_weights.load import fill
from nemo_rl_mcore.megatron.hf_weights.names import Weight
from nemo_rl_mcore.megatron.hf_weights.placement import local_parameters, this_place


class WholeWeightFilling:
    """Implements `training.policy_backend.WeightFilling`: a parameter is set once all its tensors are there."""

    def __init__(self, chunks: Sequence[torch.nn.Module], model: ModelConfig) -> None:
        self._model = model
        self._parameters = dict(local_parameters(chunks, model, this_place()))
        self._weight_of = {name: weight for weight in self._parameters for name in weight.names}
        self._missing = set(self._weight_of)
        self._parts: dict[Weight, dict[str, torch.Tensor]] = {}

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """See `WeightFilling.take`."""
        weight = self._weight_of.get(name)
        if weight is None:
            raise ValueError(f"the model has no tensor {name}")
        shape = weight.slot.shapes(self._model)[weight.names.index(name)]
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has the shape {tuple(tensor.shape)}, and the architecture gives it {shape}"
            )
        self._missing.discard(name)
        parts = self._parts.setdefault(weight, {})
        parts[name] = tensor
        if len(parts) < len(weight.names):
            parts[name] = tensor.clone()
            return
        del self._parts[weight]
        packed = weight.slot.layout.pack([parts[each] for each in weight.names], self._model)
        with torch.no_grad():
            fill(self._parameters[weight], packed)

    def missing(self) -> Sequence[str]:
        """See `WeightFilling.missing`."""
        return sorted(self._missing)
