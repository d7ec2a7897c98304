"""Log-probabilities of selected tokens, taken from decoder hidden states by Megatron's own hook.

`GPTModel.forward(..., output_processor=, output_processor_context=)` (megatron-core 0.18 and later) calls the processor
on the last pipeline stage in place of the output layer and the loss. This file is the only one that uses the hook.

Shapes: S sequence, B batch, H hidden, V vocabulary; under sequence parallelism the hidden states are [S/tp, B, H].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import __version__ as megatron_version
from megatron.core.models.gpt import GPTModel

from nemo_rl_mcore.megatron.parallel_groups import tensor_parallel_group
from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions, fused_linear_logprobs
from nemo_rl_mcore.ops.vocab_parallel import vocab_parallel_logprobs

FIRST_VERSION_WITH_HOOK = "0.18.0"


@dataclass(frozen=True)
class TokenSelection:
    """Which tokens' log-probabilities the model is to return, and how.

    targets_SB: the global id of the next token at each position, int64 [S, B].
    mask_SB: true where a log-probability is wanted, bool [S, B]; elsewhere the result is exactly 0.
    """

    targets_SB: torch.Tensor
    mask_SB: torch.Tensor
    temperature: float = 1.0
    with_entropy: bool = False


Processor = Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]


def require_hook(model_class: type = GPTModel) -> None:
    """Raise RuntimeError, naming the version to install, if the model's forward has no output_processor."""
    if "output_processor" not in inspect.signature(model_class.forward).parameters:
        raise RuntimeError(
            f"megatron-core {megatron_version} has no output_processor hook in GPTModel.forward; "
            f"install megatron-core >= {FIRST_VERSION_WITH_HOOK}"
        )


def unfused_processor(vocab_size: int) -> Processor:
    """A processor that calls the output layer and takes the selected log-probabilities from its logits."""

    def process(
        *, hidden_states: torch.Tensor, output_layer: Any, output_weight: torch.Tensor | None, context: TokenSelection,
        scale_logits: Callable[[torch.Tensor], torch.Tensor], **_unused: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=False)
        return vocab_parallel_logprobs(
            scale_logits(logits),
            context.targets_SB,
            tp_group=tensor_parallel_group(),
            temperature=context.temperature,
            mask=context.mask_SB,
            with_entropy=context.with_entropy,
            vocab_size=vocab_size,
        )

    return process


def fused_processor(options: LinearLogprobsOptions) -> Processor:
    """A processor that computes the selected log-probabilities without ever holding [S, B, V] logits.

    The model sets the options' `logit_scale`; the others are the caller's.
    """

    def process(
        *, hidden_states: torch.Tensor, output_layer: Any, output_weight: torch.Tensor | None, context: TokenSelection,
        scale_logits: Callable[[torch.Tensor], torch.Tensor], **_unused: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        return fused_linear_logprobs(
            hidden_states,
            # With tied embeddings the output layer owns no weight; the model hands over the shared one.
            output_layer.weight if output_weight is None else output_weight,
            context.targets_SB,
            tp_group=tensor_parallel_group(),
            sequence_parallel=output_layer.sequence_parallel,
            temperature=context.temperature,
            mask=context.mask_SB,
            with_entropy=context.with_entropy,
            # MuP's scaling of the logits is a multiplication, so its value at one is the factor.
            options=replace(options, logit_scale=float(scale_logits(torch.ones(())))),
        )

    return process
