"""A linear layer that every tensor-parallel rank holds whole, without Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_mcore.rank import accelerator


class ReplicatedLinear(torch.nn.Module):
    """A product with a weight that is the same on all ranks; under sequence parallelism each has its own tokens.

    init_method: fills the weight; left out, it is the configuration's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        inputs: int,
        outputs: int,
        init_method: Callable[[torch.Tensor], object] | None = None,
    ):
        super().__init__()
        weight = torch.empty(outputs, inputs, dtype=config.params_dtype, device=accelerator.device())
        self.weight = torch.nn.Parameter(weight)
        if config.perform_initialization:
            cast(Any, init_method or config.init_method)(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[..., outputs] for [..., inputs]; the second value is where upstream's layers have a bias."""
        return torch.nn.functional.linear(hidden, self.weight), None
