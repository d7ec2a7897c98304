"""Which weights of the whole model this rank holds parts of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_rl_mcore.config import ModelConfig
from nemo_rl_mcore.models.weights import EXPERT_BIAS, Weight
from nemo_rl_mcore.rank.megatron.hf_weights.packing import find_weight
from nemo_rl_mcore.rank.megatron.model_class import language_models, layer_numbers


@dataclass(frozen=True)
class Place:
    """The places of this rank among the ranks that share layers (tensor), stages (pipeline) and experts."""

    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    expert: dist.ProcessGroup

    def shard_of(self, weight: Weight) -> tuple[int, int]:
        """Return which part of a weight this rank's parameter is, and of how many; experts are not cut."""
        if weight.expert is not None:
            return 0, 1
        return self.tensor.rank(), self.tensor.size()


def this_place() -> Place:
    """Return the groups of the layout that is set up."""
    return Place(
        cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group()),
        cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group()),
        cast(dist.ProcessGroup, parallel_state.get_expert_model_parallel_group()),
    )


_OF_TABLE = re.compile(rf".*\.{EXPERT_BIAS}")
"""Buffers that are weights; the others are computed, or counted in."""


def local_parameters(
    chunks: Sequence[torch.nn.Module], model: ModelConfig, place: Place
) -> Iterator[tuple[Weight, torch.Tensor]]:
    """Yield the parameters of this rank's chunks, and the biases of experts, with the weights they are parts of.

    Raises ValueError for a parameter without a counterpart in Hugging Face models.
    """
    first_expert = place.expert.rank() * ((model.num_moe_experts or 0) // place.expert.size())
    for stage in language_models(chunks):
        layers = layer_numbers(stage)
        buffers = ((name, buffer) for name, buffer in stage.named_buffers() if _OF_TABLE.fullmatch(name))
        for name, parameter in (*stage.named_parameters(), *buffers):
            yield find_weight(name, layers, first_expert, model), parameter
