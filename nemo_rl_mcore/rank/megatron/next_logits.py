"""The logits of the next token, on every parallel layout.

Shapes: B rows, L length so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.pipeline_parallel import get_forward_backward_func

from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.agreement import together
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.context_parallel import (
    context_parallel_group,
    context_parallel_size,
    own_positions,
    owner_of,
)
from nemo_rl_mcore.rank.megatron.forward_backward import ForwardBackward, causal_inputs
from nemo_rl_mcore.rank.megatron.guard import Collect, Guard
from nemo_rl_mcore.rank.megatron.passes import no_tokens

NextLogits = Callable[[torch.Tensor], torch.Tensor]
"""From all tokens so far [B, L] to the logits [B, V] of the next one, the same on every rank of a model copy."""


def next_logits(model: ForwardBackward, rows: int, max_length: int) -> NextLogits:
    """Decode with a cache where the layout lets one token through the model, else by a whole pass for each token."""
    config = model.config
    if parallel_groups.pipeline_stages() > 1 or config.sequence_parallel or config.context_parallel_size > 1:
        return RecomputedLogits(model)
    if accelerator.has_cuda() and config.mamba_num_heads is not None:
        return RecomputedLogits(
            model
        )  # Megatron's own Mamba layers keep no state unless its engine runs them
    return CachedLogits(model, StaticInferenceContext(rows, max_length))


# Products of very few rows round otherwise, and answers are not to depend on how many prompts are read beside theirs.
_FEWEST_TOKENS = 16


@dataclass(frozen=True)
class _Place:
    """Where logits are wanted: of one position, and of these rows [B], which may repeat; None is each once."""

    position: int
    rows: torch.Tensor | None = None


@dataclass(frozen=True)
class CachedLogits:
    """Feeds only tokens that the cache has not seen: each prompt once, however many rows answer it, then one a row."""

    model: ForwardBackward
    cache: StaticInferenceContext

    def __call__(self, sequences_BL: torch.Tensor) -> torch.Tensor:
        """See `NextLogits`."""
        if self.cache.sequence_len_offset:
            return self._read(sequences_BL)
        distinct_DL, of_row_B = torch.unique(sequences_BL, dim=0, return_inverse=True)
        if distinct_DL.numel() < _FEWEST_TOKENS:
            return self._read(sequences_BL)
        logits_BV = self._read(distinct_DL, of_row_B)
        self.cache.swap_key_value_dict(of_row_B)
        return logits_BV

    def _read(self, sequences_DL: torch.Tensor, of_row_B: torch.Tensor | None = None) -> torch.Tensor:
        """Run what is unread of the sequences [D, L]; of_row_B: whose logits each row has, None for one of each."""
        offset = self.cache.sequence_len_offset
        unread = sequences_DL.shape[1] - offset
        logits_BV = self.model.chunks[0](
            *causal_inputs(sequences_DL, start=offset),
            inference_context=self.cache,
            output_processor=_logits_at,
            output_processor_context=_Place(unread - 1, of_row_B),
        )
        self.cache.increment_sequence_len_offset(unread)
        self.cache.enable_decode_mode()
        return logits_BV


@dataclass(frozen=True)
class RecomputedLogits:
    """Runs all tokens through the schedule: pipeline stages and shared sequences work as in training."""

    model: ForwardBackward

    def __call__(self, sequences_BL: torch.Tensor) -> torch.Tensor:
        """See `NextLogits`."""
        rows, length = sequences_BL.shape
        padded = torch.nn.functional.pad(sequences_BL, (0, -length % self.model.sequence_multiple))
        input_ids, positions, mask = causal_inputs(padded)
        own = own_positions(padded.shape[1]).to(padded.device)
        input_ids, positions = input_ids.index_select(1, own), positions.index_select(1, own)
        owner, place = owner_of(length - 1, padded.shape[1])
        guard = Guard(self.model.config)

        def forward_step(_data: object, chunk: Any) -> Any:
            def run() -> tuple[torch.Tensor, Collect]:
                logits_BV = chunk(
                    *(input_ids, positions, mask),
                    output_processor=_logits_at,
                    output_processor_context=_Place(place),
                )
                return logits_BV, lambda output: (output.sum(), no_tokens(output), output)

            return guard.forward_step(chunk, input_ids, run)

        chunks = self.model.chunks
        interleaved = len(chunks) > 1
        parts = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(()) for _ in chunks] if interleaved else iter(()),
            model=[*chunks] if interleaved else chunks[0],
            # The interleaved schedule runs microbatches in multiples of the stages: the same one each time.
            num_microbatches=parallel_groups.pipeline_stages() if interleaved else 1,
            seq_length=padded.shape[1],
            micro_batch_size=rows,
            forward_only=True,
        )
        with together("the next token", parallel_groups.pipeline_group()):
            guard.raise_error()
        logits_BV = parts[0] if parts else None
        if logits_BV is not None and context_parallel_size() > 1:
            dist.broadcast(logits_BV, group=context_parallel_group(), group_src=owner)
        return parallel_groups.broadcast_tensor_from_last_stage(logits_BV)


def _logits_at(
    *,
    hidden_states: torch.Tensor,
    output_layer: Any,
    output_weight: torch.Tensor | None,
    scale_logits: Any,
    context: _Place,
    **_unused: Any,
) -> torch.Tensor:
    """Return an output processor: the logits [B, V] at one position, gathered over the tensor-parallel ranks."""
    position = context.position
    if not output_layer.sequence_parallel:
        hidden_states, position = hidden_states[position : position + 1], 0
    if context.rows is not None:
        hidden_states = hidden_states[:, context.rows]
    # Under sequence parallelism the output layer gathers the sequence itself, so it is handed the whole.
    logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=True)
    return scale_logits(logits)[position]
