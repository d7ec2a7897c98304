"""The critic's head: one number a position, from the hidden states at the end of the last pipeline stage."""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron.model_class import LanguageModel

VALUE_HEAD = "value_head"
"""What the head is called among the model's modules."""


class ValueHead(torch.nn.Module):
    """A linear map to one number, fp32 also in a 16-bit model and zero at the start, so that every value is 0.

    Each tensor-parallel rank holds a copy. Under sequence parallelism it sees a part of the positions, and the mark on
    its weight has `finalize_model_grads` sum the gradient over those ranks.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self._sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(config.hidden_size, device=accelerator.device()))
        self.bias = torch.nn.Parameter(torch.zeros(1, device=accelerator.device()))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """Return the values fp32 [S, B]; hidden states [S, B, H], or [S/tp, B, H] under sequence parallelism."""
        values_SB = hidden_SBH.float() @ self.weight + self.bias
        if not self._sequence_parallel:
            return values_SB
        # Every rank computes the same loss of the same values, so the backward pass keeps its own part.
        return gather_from_sequence_parallel_region(values_SB, tensor_parallel_output_grad=False)


def give_value_head(model: LanguageModel) -> None:
    """Add the head to a last stage, and take the output weight out of training: a critic has no use for it.

    Stages that share their embedding as an output weight part with the last one's copy, which no pass would train or
    gather; prediction layers use it.
    """
    apart = model.pre_process is not model.post_process and not model.config.mtp_num_layers
    if model.share_embeddings_and_output_weights and apart:
        shared = cast(Any, model)
        if model.pre_process:
            # `finalize_model_grads` would sum its gradient with that of the copy.
            shared.share_embeddings_and_output_weights = False
        else:
            shared.output_layer.weight = None
            # It would look for the copy among the tensors of a checkpoint (models/common/language_module).
            shared.tie_embeddings_and_output_weights_state_dict = lambda *_: None
    if not model.post_process:
        return
    model.add_module(VALUE_HEAD, ValueHead(model.config))
    if not model.share_embeddings_and_output_weights:
        for parameter in model.output_layer.parameters():
            parameter.requires_grad = False


def value_head_of(model: torch.nn.Module) -> ValueHead | None:
    """Return the value head of a model, wrapped or not; None where it has none."""
    heads = [module for module in model.modules() if isinstance(module, ValueHead)]
    return cast(ValueHead, heads[0]) if heads else None
