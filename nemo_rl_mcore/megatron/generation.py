"""The embedded generation engine: decoding through the training model itself, on every parallel layout.

Shapes: B rows, P prompt length, L length so far, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.pipeline_parallel import get_forward_backward_func

from nemo_rl_mcore import accelerator
from nemo_rl_mcore.megatron import parallel_groups
from nemo_rl_mcore.megatron.forward_backward import ForwardBackward, causal_inputs, evaluation_mode
from nemo_rl_mcore.megatron.passes import no_tokens
from nemo_rl_mcore.ops.sampling import SamplingParams, keyed_uniforms, sample_tokens

NextLogits = Callable[[torch.Tensor], torch.Tensor]
"""From all tokens so far [B, L] to the logits [B, V] of the next one, the same on every rank of a model copy."""


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate: ragged prompts, each with the key of its noise.

    prompts: token ids of each row; keys_B: int64 [B], see `ops.sampling.sample_keys`; stop_ids end a row, and belong to
    the response; batch_size: rows that are decoded together at most, None for all.
    """

    prompts: Sequence[Sequence[int]]
    keys_B: torch.Tensor
    max_new_tokens: int
    stop_ids: frozenset[int]
    sampling: SamplingParams
    batch_size: int | None = None


@dataclass(frozen=True)
class GeneratedRows:
    """Responses on the CPU: tokens int64 [B, T] and logprobs fp32 [B, T], both 0 from `lengths` [B] on.

    finished bool [B]: the row ended with a stop token, not at the length limit.
    """

    tokens_BT: torch.Tensor
    logprobs_BT: torch.Tensor
    lengths_B: torch.Tensor
    finished_B: torch.Tensor


def generate(model: ForwardBackward, request: GenerationRequest, vocab_size: int) -> GeneratedRows:
    """Answer all prompts. Rows of equal prompt length run together, since a batch of the KV cache has one offset."""
    rows = len(request.prompts)
    tokens_BT = torch.zeros(rows, request.max_new_tokens, dtype=torch.long)
    logprobs_BT = torch.zeros(rows, request.max_new_tokens)
    with evaluation_mode(model.chunks):
        for members in _in_step(model, [*_batches_of_equal_length(request)]):
            # A batch without members keeps the other ranks company; nothing of it is used.
            prompts_BP = torch.tensor([list(request.prompts[row]) for row in members] or [[0]])
            keys_B = request.keys_B[members] if members else torch.zeros(1, dtype=torch.long)
            next_logits = _next_logits(model, prompts_BP.shape, request.max_new_tokens)
            tokens, logprobs = _decode(model, prompts_BP, keys_B, request, next_logits, vocab_size)
            if members:
                tokens_BT[members], logprobs_BT[members] = tokens, logprobs
    lengths_B, finished_B = _lengths(tokens_BT, request.stop_ids)
    padding_BT = torch.arange(request.max_new_tokens) >= lengths_B.unsqueeze(1)
    return GeneratedRows(
        tokens_BT.masked_fill_(padding_BT, 0),
        logprobs_BT.masked_fill_(padding_BT, 0.0),
        lengths_B,
        finished_B,
    )


def _batches_of_equal_length(request: GenerationRequest) -> Iterator[list[int]]:
    by_length: dict[int, list[int]] = defaultdict(list)
    for row, prompt in enumerate(request.prompts):
        by_length[len(prompt)].append(row)
    for _, rows in sorted(by_length.items()):
        size = request.batch_size or len(rows)
        yield from (rows[start : start + size] for start in range(0, len(rows), size))


def _exchanges_tokens(model: ForwardBackward) -> bool:
    """Whether a forward pass meets other data-parallel ranks, which then must make as many passes."""
    return model.config.expert_model_parallel_size > 1


def _in_step(model: ForwardBackward, batches: list[list[int]]) -> list[list[int]]:
    """The batches, and empty ones where another rank that this one exchanges tokens with has more."""
    if not _exchanges_tokens(model):
        return batches
    most = parallel_groups.largest_of_data_parallel_ranks(len(batches))
    return batches + [[]] * (most - len(batches))


def _all_done(model: ForwardBackward, done_B: torch.Tensor) -> bool:
    """Whether no rank that this one exchanges tokens with has a row left to decode."""
    done = bool(done_B.all())
    if not _exchanges_tokens(model):
        return done
    return not parallel_groups.largest_of_data_parallel_ranks(int(not done))


def _lengths(tokens_BT: torch.Tensor, stop_ids: frozenset[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tokens each response has, its stop token included, and whether it has one."""
    is_stop_BT = torch.isin(tokens_BT, torch.tensor(sorted(stop_ids), dtype=torch.long))
    finished_B = is_stop_BT.any(1)
    first_stop_B = is_stop_BT.int().argmax(1)
    return torch.where(finished_B, first_stop_B + 1, tokens_BT.shape[1]), finished_B


def _decode(
    model: ForwardBackward,
    prompts_BP: torch.Tensor,
    keys_B: torch.Tensor,
    request: GenerationRequest,
    next_logits: NextLogits,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probabilities [B, T] on the CPU; what stands behind a row's stop token has no meaning."""
    device = accelerator.device()
    sequences_BL, keys_B = prompts_BP.to(device), keys_B.to(device)
    stop_ids = torch.tensor(sorted(request.stop_ids), dtype=torch.long, device=device)
    rows, steps = prompts_BP.shape[0], request.max_new_tokens
    tokens_BT = sequences_BL.new_zeros(rows, steps)
    logprobs_BT = torch.zeros(rows, steps, device=device)
    done_B = torch.zeros(rows, dtype=torch.bool, device=device)
    for step in range(steps):
        tokens_B, logprobs_B = sample_tokens(
            # The padding rows of the embedding are no tokens.
            next_logits(sequences_BL)[:, :vocab_size],
            keyed_uniforms(keys_B, step),
            request.sampling,
        )
        tokens_BT[:, step], logprobs_BT[:, step] = tokens_B, logprobs_B
        done_B |= torch.isin(tokens_B, stop_ids)
        if _all_done(model, done_B):
            break
        sequences_BL = torch.cat([sequences_BL, tokens_B.unsqueeze(1)], dim=1)
    return tokens_BT.cpu(), logprobs_BT.cpu()


def _next_logits(model: ForwardBackward, prompts_shape: torch.Size, max_new_tokens: int) -> NextLogits:
    """Cached decoding where the layout lets a single token through the model, else a whole pass for each token."""
    if parallel_groups.pipeline_stages() > 1 or model.config.sequence_parallel:
        return _RecomputedLogits(model)
    rows, prompt_length = prompts_shape
    return _CachedLogits(model, StaticInferenceContext(rows, prompt_length + max_new_tokens))


@dataclass(frozen=True)
class _CachedLogits:
    """Feeds only the tokens that the cache has not seen: the prompts, then one token a row."""

    model: ForwardBackward
    cache: StaticInferenceContext

    def __call__(self, sequences_BL: torch.Tensor) -> torch.Tensor:
        offset = self.cache.sequence_len_offset
        unread = sequences_BL[:, offset:]
        logits_BV = self.model.chunks[0](
            *causal_inputs(sequences_BL, start=offset),
            inference_context=self.cache,
            output_processor=_logits_at,
            output_processor_context=unread.shape[1] - 1,
        )
        self.cache.increment_sequence_len_offset(unread.shape[1])
        self.cache.enable_decode_mode()
        return logits_BV


@dataclass(frozen=True)
class _RecomputedLogits:
    """Runs all tokens through the schedule, so that pipeline stages and sequence parallelism work as in training."""

    model: ForwardBackward

    def __call__(self, sequences_BL: torch.Tensor) -> torch.Tensor:
        rows, length = sequences_BL.shape
        padded = torch.nn.functional.pad(sequences_BL, (0, -length % self.model.sequence_multiple))

        def forward_step(_data: object, chunk: Any) -> Any:
            logits_BV = chunk(
                *causal_inputs(padded), output_processor=_logits_at, output_processor_context=length - 1
            )
            return logits_BV, lambda output: (output.sum(), no_tokens(output), output)

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
        return parallel_groups.broadcast_tensor_from_last_stage(parts[0] if parts else None)


def _logits_at(
    *,
    hidden_states: torch.Tensor,
    output_layer: Any,
    output_weight: torch.Tensor | None,
    scale_logits: Any,
    context: int,
    **_unused: Any,
) -> torch.Tensor:
    """An output processor: the logits [B, V] at one position, gathered over the tensor-parallel ranks."""
    if not output_layer.sequence_parallel:
        hidden_states, context = hidden_states[context : context + 1], 0
    # Under sequence parallelism the output layer gathers the sequence itself, so it is handed the whole.
    logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=True)
    return scale_logits(logits)[context]
