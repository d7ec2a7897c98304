"""Decoding through a training model, token by token.

Shapes: B rows that run together, P prompt length, L length so far, T new tokens, N rows that are not complete.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.pipeline_parallel import get_forward_backward_func

from nemo_rl_mcore.data.batched_data_dict import digests_of_rows
from nemo_rl_mcore.data.tokenizer import StopConditions
from nemo_rl_mcore.ops.sampling import SamplingParams, at_temperature, keyed_uniforms, sample_tokens
from nemo_rl_mcore.rank import accelerator, activity
from nemo_rl_mcore.rank.agreement import together
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.context_parallel import (
    context_parallel_group,
    context_parallel_size,
    own_positions,
    owner_of,
)
from nemo_rl_mcore.rank.megatron.guard import Collect, Guard
from nemo_rl_mcore.rank.megatron.passes import no_tokens
from nemo_rl_mcore.rank.megatron.train_backend import ForwardBackward, causal_inputs, evaluation_mode
from nemo_rl_mcore.rank.policy_backend import GeneratedRows, GenerationRequest, SampledTokens

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


def generate(session: DecodingSession, request: GenerationRequest) -> GeneratedRows:
    """Answer all prompts in a new session."""
    session.add(request)
    rows, steps = len(request.prompts), request.max_new_tokens
    tokens_BT, logprobs_BT = torch.zeros(rows, steps, dtype=torch.long), torch.zeros(rows, steps)
    lengths_B, finished_B = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.bool)
    with evaluation_mode(session.model.chunks):  # once, not at each token
        while (sampled := session.step()) is not None:
            at = sampled.rows_N, lengths_B[sampled.rows_N]
            tokens_BT[at], logprobs_BT[at] = sampled.tokens_N, sampled.logprobs_N
            lengths_B[sampled.rows_N] += 1
            finished_B[sampled.rows_N] = sampled.stopped_N
    return GeneratedRows(tokens_BT, logprobs_BT, lengths_B, finished_B, digests_of_rows(tokens_BT, lengths_B))


def next_logprobs(
    model: ForwardBackward, vocab_size: int, prompts: Sequence[Sequence[int]], temperature: float
) -> torch.Tensor:
    """Return log-probabilities of all tokens after each prompt, fp32 [B, V] on the CPU, by the passes of a session."""
    rows: list[torch.Tensor] = []
    with evaluation_mode(model.chunks):
        for prompt in prompts:
            ids_1P = torch.tensor([list(prompt)], device=accelerator.device())
            logits_1V = next_logits(model, 1, len(prompt) + 1)(ids_1P)[:, :vocab_size]
            rows.append(at_temperature(logits_1V, temperature).log_softmax(-1).cpu())
    return torch.cat(rows)


class DecodingSession:
    """Implements `rank.policy_backend.Decoding`; between two steps requests may be added too.

    Rows of equal prompt length run together, since a batch of the KV cache has one offset, and batches run one after
    the other. All ranks of a model copy make the same calls. Ranks that exchange tokens step alike, however many rows
    each has. A step that raises ends the session.
    """

    def __init__(self, model: ForwardBackward, vocab_size: int):
        self.model, self._vocab_size = model, vocab_size
        self._waiting: deque[_Waiting] = deque()
        self._batch: _Batch | None = None
        self._rows = 0

    def add(self, request: GenerationRequest) -> range:
        """See `Decoding.add`."""
        first, self._rows = self._rows, self._rows + len(request.prompts)
        for places in _batches_of_equal_length(request):
            self._waiting.append(_Waiting(request, {first + place: place for place in places}))
        return range(first, self._rows)

    def step(self) -> SampledTokens | None:
        """See `Decoding.step`.

        There may be no row among them: the others that this rank exchanges tokens with are then kept company.
        """
        with evaluation_mode(self.model.chunks):
            self._batch = self._batch or self._next_batch()
            if self._batch is None:
                return None
            sampled = self._batch.step(self._vocab_size)
        if not self._largest(len(self._batch.open)):
            self._batch = None
        return sampled

    def reread(self) -> None:
        """See `Decoding.reread`."""
        if self._batch is not None:
            self._batch.reread(self.model)

    def _next_batch(self) -> _Batch | None:
        waiting = self._waiting.popleft() if self._waiting else None
        steps = self._largest(0 if waiting is None else waiting.bound)
        return _Batch.of(self.model, waiting or _NOTHING, steps) if steps else None

    def _largest(self, number: int) -> int:
        """Return the largest of the numbers of this rank and those that it exchanges tokens with in a forward pass."""
        if self.model.config.expert_model_parallel_size == 1:
            return number
        return parallel_groups.largest_of_data_parallel_ranks(number)


def _batches_of_equal_length(request: GenerationRequest) -> Iterator[list[int]]:
    by_length: dict[int, list[int]] = defaultdict(list)
    for row, prompt in enumerate(request.prompts):
        by_length[len(prompt)].append(row)
    for _, rows in sorted(by_length.items()):
        size = request.batch_size or len(rows)
        yield from (rows[start : start + size] for start in range(0, len(rows), size))


@dataclass(frozen=True)
class _Waiting:
    """Rows of a request that will run together: row of the session -> place in the request."""

    request: GenerationRequest
    places: dict[int, int]

    @property
    def bound(self) -> int:
        """Return the most tokens of each response: the prompts have one length."""
        return self.request.bound(next(iter(self.places.values()), 0))


# What a rank without rows runs to keep the others company: one token, of which nothing is used.
_NOTHING = _Waiting(
    GenerationRequest(
        [[0]], torch.zeros(1, dtype=torch.long), 0, [StopConditions()], SamplingParams(greedy=True)
    ),
    {},
)


@dataclass
class _Batch:
    """Rows that run together. A row that is complete runs on, unseen, until all are.

    open: row of the session -> place in the batch, of those that are not complete.
    bound: tokens of a response at most; steps: tokens that are drawn at most, for other ranks' rows too.
    stops: what ends each place; new_tokens: what was drawn for it.
    """

    request: GenerationRequest
    bound: int
    steps: int
    open: dict[int, int]
    sequences_BL: torch.Tensor
    keys_B: torch.Tensor
    stops: list[StopConditions]
    next_logits: NextLogits
    new_tokens: list[list[int]]

    @classmethod
    def of(cls, model: ForwardBackward, waiting: _Waiting, steps: int) -> _Batch:
        """Return a batch that is decoded by so many tokens at most."""
        request, device = waiting.request, accelerator.device()
        places = [*waiting.places.values()] or [0]
        prompts_BP = torch.tensor([list(request.prompts[place]) for place in places])
        rows, length = prompts_BP.shape
        return cls(
            request,
            waiting.bound,
            steps,
            {row: place for place, row in enumerate(waiting.places)},
            prompts_BP.to(device),
            request.keys_B[places].to(device),
            [request.stops[place] for place in places],
            next_logits(model, rows, length + steps),
            [[] for _ in places],
        )

    def reread(self, model: ForwardBackward) -> None:
        """Start with an empty cache, of the same size."""
        rows, length = self.sequences_BL.shape
        self.next_logits = next_logits(model, rows, length + self.steps - len(self.new_tokens[0]))

    def step(self, vocab_size: int) -> SampledTokens:
        """Draw a token for each row, and close those that it completes."""
        drawn = len(self.new_tokens[0])
        activity.advance(f"token {drawn + 1} of an answer")
        tokens_B, logprobs_B = sample_tokens(
            # The padding rows of the embedding are no tokens.
            self.next_logits(self.sequences_BL)[:, :vocab_size],
            keyed_uniforms(self.keys_B, drawn),
            self.request.sampling,
        )
        self.sequences_BL = torch.cat([self.sequences_BL, tokens_B.unsqueeze(1)], dim=1)
        for new_tokens, token in zip(self.new_tokens, tokens_B.tolist(), strict=True):
            new_tokens.append(token)
        running = self.open
        stopped = [self.stops[place].met_by(self.new_tokens[place]) for place in running.values()]
        at_limit = drawn + 1 == self.bound
        self.open = {
            row: place
            for (row, place), ends in zip(running.items(), stopped, strict=True)
            if not (ends or at_limit)
        }
        places = torch.tensor([*running.values()], dtype=torch.long)
        return SampledTokens(
            torch.tensor([*running], dtype=torch.long),
            tokens_B.cpu()[places],
            logprobs_B.cpu()[places],
            torch.tensor(stopped, dtype=torch.bool),
        )
