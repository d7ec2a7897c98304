"""Let a schedule run to its end although a step of this rank failed, so that no rank waits for what never comes.

Shapes: S sequence, B rows of a microbatch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron.passes import LossTriple, Outputs, all_of, no_tokens

Collect = Callable[..., LossTriple]


@dataclass
class Guard:
    """Keeps the first error of one schedule call; whoever made the call raises it, on all ranks, when it has ended.

    A loss that failed becomes a zero whose gradients are zeros: the backward pass runs as on the ranks beside this one.
    Under pipeline parallelism so does a forward step that failed: zeros go on to the next stage. What cannot be made
    up for: a failure of one rank alone inside of layers that it shares with others (tensor or expert parallelism),
    and one in a backward pass under pipeline parallelism. Those others wait until their group's time is over.
    """

    config: TransformerConfig
    error: Exception | None = None

    def forward_step(
        self, model: Any, ids_BS: torch.Tensor, run: Callable[[], tuple[Any, Collect]]
    ) -> tuple[Any, Collect]:
        """Run a forward step of one microbatch (its input ids as the model takes them): its output and its loss."""
        try:
            return run()
        except Exception as error:
            if self.config.pipeline_model_parallel_size == 1:
                raise
            self._keep(error)
            return self._stand_in(unwrap_model(model), ids_BS), _nothing

    def loss(self, collect: Collect) -> Collect:
        """Return the loss of one microbatch; where it fails, or one before it has failed, zero."""

        def guarded(output: Outputs) -> LossTriple:
            if self.error is None:
                try:
                    return collect(output)
                except Exception as error:
                    self._keep(error)
                    if self._alone:
                        raise
            return _nothing(output)

        return guarded

    def raise_error(self) -> None:
        """Raise the error that was kept, if there is one, and forget it.

        An error that is held by a frame of its own traceback would stay, and all activations of those frames with it.
        """
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    @property
    def _alone(self) -> bool:
        """Return whether no other rank takes part in this one's passes."""
        config = self.config
        shared = (
            config.tensor_model_parallel_size,
            config.pipeline_model_parallel_size,
            config.expert_model_parallel_size,
            config.context_parallel_size,
        )
        return max(shared) == 1

    def _keep(self, error: Exception) -> None:
        self.error = self.error or error

    def _stand_in(self, model: Any, ids_BS: torch.Tensor) -> torch.Tensor:
        """Return what this stage would have sent on, as zeros [S, B, H]; its gradient, zeros too, goes back."""
        rows, columns = ids_BS.shape
        if self.config.sequence_parallel:
            columns //= self.config.tensor_model_parallel_size
        shape = (1,) if model.post_process else (columns, rows, self.config.hidden_size)
        zeros = torch.zeros(shape, dtype=self.config.pipeline_dtype, device=accelerator.device())
        received = zeros.requires_grad_() if model.pre_process else model.decoder.input_tensor
        return zeros + _zero(received)


def _nothing(output: Outputs) -> LossTriple:
    loss = torch.stack([_zero(part).float() for part in all_of(output)]).sum()
    return loss, no_tokens(loss), None


def _zero(of: torch.Tensor) -> torch.Tensor:
    """Zero, whose gradients are zeros also where the tensor is not finite."""
    return of.flatten()[:0].sum()
