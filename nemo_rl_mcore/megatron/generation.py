"""The embedded generation engine: KV-cached decoding through the training model itself.

Shapes: B rows, P prompt length, T new tokens, V vocabulary (padded).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.inference.contexts import StaticInferenceContext

from nemo_rl_mcore import accelerator
from nemo_rl_mcore.megatron.forward_backward import evaluation_mode
from nemo_rl_mcore.ops.sampling import SamplingParams, keyed_uniforms, sample_tokens


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate: ragged prompts, each with the key of its noise.

    prompts: token ids of each row; keys_B: int64 [B], see `ops.sampling.sample_keys`; stop_ids end a row, and belong to
    the response.
    """

    prompts: Sequence[Sequence[int]]
    keys_B: torch.Tensor
    max_new_tokens: int
    stop_ids: frozenset[int]
    sampling: SamplingParams


@dataclass(frozen=True)
class GeneratedRows:
    """Responses on the CPU: tokens int64 [B, T] and logprobs fp32 [B, T], both 0 from `lengths` [B] on.

    finished bool [B]: the row ended with a stop token, not at the length limit.
    """

    tokens_BT: torch.Tensor
    logprobs_BT: torch.Tensor
    lengths_B: torch.Tensor
    finished_B: torch.Tensor


def generate(model: DistributedDataParallel, request: GenerationRequest, vocab_size: int) -> GeneratedRows:
    """Decode all prompts. Rows of equal prompt length run together, since a batch of the KV cache has one offset."""
    rows = len(request.prompts)
    tokens_BT = torch.zeros(rows, request.max_new_tokens, dtype=torch.long)
    logprobs_BT = torch.zeros(rows, request.max_new_tokens)
    by_length: dict[int, list[int]] = defaultdict(list)
    for row, prompt in enumerate(request.prompts):
        by_length[len(prompt)].append(row)
    with evaluation_mode([model]):
        for _, members in sorted(by_length.items()):
            prompts_BP = torch.tensor([list(request.prompts[row]) for row in members])
            decoder = _Decoder(model, prompts_BP, request, request.keys_B[members], vocab_size)
            tokens_BT[members], logprobs_BT[members] = decoder.run()
    lengths_B, finished_B = _lengths(tokens_BT, request.stop_ids)
    padding_BT = torch.arange(request.max_new_tokens) >= lengths_B.unsqueeze(1)
    return GeneratedRows(
        tokens_BT.masked_fill_(padding_BT, 0),
        logprobs_BT.masked_fill_(padding_BT, 0.0),
        lengths_B,
        finished_B,
    )


def _lengths(tokens_BT: torch.Tensor, stop_ids: frozenset[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tokens each response has, its stop token included, and whether it has one."""
    is_stop_BT = torch.isin(tokens_BT, torch.tensor(sorted(stop_ids), dtype=torch.long))
    finished_B = is_stop_BT.any(1)
    first_stop_B = is_stop_BT.int().argmax(1)
    return torch.where(finished_B, first_stop_B + 1, tokens_BT.shape[1]), finished_B


class _Decoder:
    """Decodes one batch of prompts of equal length: a prefill, then a token at a time."""

    def __init__(
        self,
        model: Any,
        prompts_BP: torch.Tensor,
        request: GenerationRequest,
        keys_B: torch.Tensor,
        vocab_size: int,
    ):
        self._model, self._request, self._vocab_size = model, request, vocab_size
        device = accelerator.device()
        self._prompts_BP, self._keys_B = prompts_BP.to(device), keys_B.to(device)
        self._stop_ids = torch.tensor(sorted(request.stop_ids), dtype=torch.long, device=device)
        rows, prompt_length = prompts_BP.shape
        self._cache = StaticInferenceContext(rows, prompt_length + request.max_new_tokens)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and log-probabilities [B, T]; what stands behind a row's stop token has no meaning."""
        rows, steps = self._prompts_BP.shape[0], self._request.max_new_tokens
        tokens_BT = self._prompts_BP.new_zeros(rows, steps)
        logprobs_BT = torch.zeros(rows, steps, device=tokens_BT.device)
        done_B = torch.zeros(rows, dtype=torch.bool, device=tokens_BT.device)
        unread = self._prompts_BP
        for step in range(steps):
            logits_BV = self._next_token_logits(unread)
            uniforms_B = keyed_uniforms(self._keys_B, step)
            tokens_BT[:, step], logprobs_BT[:, step] = sample_tokens(
                logits_BV, uniforms_B, self._request.sampling
            )
            done_B |= torch.isin(tokens_BT[:, step], self._stop_ids)
            if bool(done_B.all()):
                break
            unread = tokens_BT[:, step : step + 1]
        return tokens_BT.cpu(), logprobs_BT.cpu()

    def _next_token_logits(self, unread: torch.Tensor) -> torch.Tensor:
        """Feed tokens [B, n] that the cache has not seen; the logits [B, V] after the last of them."""
        rows, length = unread.shape
        offset = self._cache.sequence_len_offset
        positions = torch.arange(offset, offset + length, device=unread.device).expand(rows, -1)
        causal = torch.ones(1, 1, length, length, dtype=torch.bool, device=unread.device).triu(1)
        logits_BV = self._model(
            unread,
            positions,
            causal if length > 1 else None,  # a single token may see all that is cached
            inference_context=self._cache,
            output_processor=_last_token_logits,
        )
        self._cache.increment_sequence_len_offset(length)
        self._cache.enable_decode_mode()
        # The padding rows of the embedding are no tokens.
        return logits_BV[:, : self._vocab_size]


def _last_token_logits(
    *,
    hidden_states: torch.Tensor,
    output_layer: Any,
    output_weight: torch.Tensor | None,
    scale_logits: Any,
    **_unused: Any,
) -> torch.Tensor:
    """An output processor: the logits [B, V] of the last position alone, gathered over the tensor-parallel ranks."""
    logits, _ = output_layer(hidden_states[-1:], weight=output_weight, runtime_gather_output=True)
    return scale_logits(logits)[0]
