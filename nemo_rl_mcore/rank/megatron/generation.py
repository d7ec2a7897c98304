"""Decoding with a training model, token by token.

Shapes: B rows that are decoded together, L length so far, V vocabulary, T new tokens, N unfinished rows.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.pipeline_parallel import get_forward_backward_func

from nemo_rl_mcore.data.batched_data_dict import digests_of_rows
from nemo_rl_mcore.data.tokenizer import StopConditions
from nemo_rl_mcore.ops.sampling import SamplingParams, bound_of, keyed_uniforms, sample_tokens
from nemo_rl_mcore.rank import accelerator, activity
from nemo_rl_mcore.rank.agreement import together
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.batching import zigzag
from nemo_rl_mcore.rank.megatron.passes import Collect, Guard, no_tokens
from nemo_rl_mcore.rank.megatron.train_backend import ForwardBackward, causal_inputs, evaluation_mode
from nemo_rl_mcore.rank.policy_backend import GeneratedRows, GenerationRequest, SampledTokens

NextLogits = Callable[[torch.Tensor], torch.Tensor]
"""From all tokens so far [B, L] to the next token's logits [B, V], equal on every rank of a model copy."""


def next_logits(
    model: ForwardBackward, rows: int, max_length: int, routes: list[torch.Tensor] | None = None
) -> NextLogits:
    """Return a decoder with a KV cache if the layout allows one, else a decoder that runs a whole pass per token.

    routes: if given, kept up to date with the routes of the tokens so far, in consecutive parts [B, tokens, L, K].
    """
    config = model.config
    divided = max(config.pipeline_model_parallel_size, config.context_parallel_size) > 1
    # Megatron's own Mamba layers keep their state only in Megatron's inference engine, and gated delta nets nowhere.
    recurrent = config.mamba_num_heads is not None or config.linear_attention_freq is not None
    stateless = accelerator.has_cuda() and recurrent
    if divided or config.sequence_parallel or stateless:
        return partial(_recomputed_logits, model, routes)
    return partial(_cached_logits, model, StaticInferenceContext(rows, max_length), routes)


# Matrix products of very few rows round differently, and a response must not depend on the batch's other prompts.
_FEWEST_TOKENS = 16


@dataclass(frozen=True)
class _Place:
    """The position to return logits for, and the rows [B], which may repeat; None: each row once."""

    position: int
    rows: torch.Tensor | None = None


def _cached_logits(
    model: ForwardBackward,
    cache: StaticInferenceContext,
    routes: list[torch.Tensor] | None,
    sequences_BL: torch.Tensor,
) -> torch.Tensor:
    """Run only the tokens that are not in the cache: each distinct prompt once, then one token per row."""
    offset, of_row_B = cache.sequence_len_offset, None
    if not offset:
        distinct_DL, distinct_of_row_B = torch.unique(sequences_BL, dim=0, return_inverse=True)
        if distinct_DL.numel() >= _FEWEST_TOKENS:
            sequences_BL, of_row_B = distinct_DL, distinct_of_row_B
    unread = sequences_BL.shape[1] - offset
    logits_BV = model.chunks[0](
        *causal_inputs(sequences_BL, start=offset),
        inference_context=cache,
        output_processor=_logits_at,
        output_processor_context=_Place(unread - 1, of_row_B),
    )
    if routes is not None:
        assert model.routes is not None
        found = model.routes.of_last_pass(len(sequences_BL))
        routes.append(found if of_row_B is None else found[of_row_B])
    cache.increment_sequence_len_offset(unread)
    cache.enable_decode_mode()
    if of_row_B is not None:
        cache.swap_key_value_dict(of_row_B)
    return logits_BV


def _recomputed_logits(
    model: ForwardBackward, routes: list[torch.Tensor] | None, sequences_BL: torch.Tensor
) -> torch.Tensor:
    rows, length = sequences_BL.shape
    padded = torch.nn.functional.pad(sequences_BL, (0, -length % model.batching.column_multiple))
    input_ids, positions, mask = causal_inputs(padded)
    context_ranks = parallel_groups.group("context")
    of_ranks = zigzag((0, padded.shape[1]), context_ranks.size())
    own = of_ranks[context_ranks.rank()].to(padded.device)
    input_ids, positions = input_ids.index_select(1, own), positions.index_select(1, own)
    owner, place = (of_ranks == length - 1).nonzero()[0].tolist()
    guard, chunks = Guard(model.config), model.chunks

    def forward_step(_data: object, chunk: Any) -> Any:
        def run() -> tuple[torch.Tensor, Collect]:
            hook = {"output_processor": _logits_at, "output_processor_context": _Place(place)}
            logits_BV = chunk(input_ids, positions, mask, **hook)
            return logits_BV, lambda output: (output.sum(), no_tokens(output), output)

        return guard.forward_step(chunk, input_ids, run)

    interleaved = len(chunks) > 1
    parts = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(()) for _ in chunks] if interleaved else iter(()),
        model=[*chunks] if interleaved else chunks[0],
        # The interleaved schedule needs a multiple of the stages: the same microbatch is repeated.
        num_microbatches=model.config.pipeline_model_parallel_size if interleaved else 1,
        seq_length=padded.shape[1],
        micro_batch_size=rows,
        forward_only=True,
    )
    with together("the next token", parallel_groups.group("pipeline")):
        guard.raise_error()
    if routes is not None:  # in an engine, whose model is not divided
        assert model.routes is not None
        routes[:] = [model.routes.of_last_pass(rows)[:, :length]]
    logits_BV = parts[0] if parts else None
    if logits_BV is not None and context_ranks.size() > 1:
        dist.broadcast(logits_BV, group=context_ranks, group_src=owner)
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
    """Output processor: return the logits [B, V] at one position, gathered over the tensor-parallel ranks."""
    position = context.position
    if not output_layer.sequence_parallel:
        hidden_states, position = hidden_states[position : position + 1], 0
    if context.rows is not None:
        hidden_states = hidden_states[:, context.rows]
    # Under sequence parallelism the output layer gathers the sequence itself.
    logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=True)
    return scale_logits(logits)[position]


def generate(session: DecodingSession, request: GenerationRequest) -> GeneratedRows:
    session.add(request)
    rows, steps = len(request.prompts), request.max_new_tokens
    tokens_BT, logprobs_BT = torch.zeros(rows, steps, dtype=torch.long), torch.zeros(rows, steps)
    lengths_B, finished_B = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.bool)
    with evaluation_mode(session.model.chunks):  # entered once here, instead of for each token
        while (sampled := session.step()) is not None:
            at = sampled.rows_N, lengths_B[sampled.rows_N]
            tokens_BT[at], logprobs_BT[at] = sampled.tokens_N, sampled.logprobs_N
            lengths_B[sampled.rows_N] += 1
            finished_B[sampled.rows_N] = sampled.stopped_N
    return GeneratedRows(tokens_BT, logprobs_BT, lengths_B, finished_B, digests_of_rows(tokens_BT, lengths_B))


@dataclass(eq=False)
class DecodingSession:
    """Decodes rows of equal prompt length together, since a batch of the KV cache has one offset.

    An error ends the session. If weights change between two steps, the next token is sampled with the new ones, from a
    cache filled by the old ones. Batches run one after the other. A model copy's ranks make the same calls, an
    expert-parallel group's ranks the same number of steps.
    """

    model: ForwardBackward
    vocab_size: int
    keeps_routes: bool = field(default=False, kw_only=True)
    _waiting: deque[_Batch] = field(default_factory=lambda: deque[_Batch]())
    _batch: _Batch | None = None
    _rows: int = 0

    def add(self, request: GenerationRequest) -> range:
        """Queue prompts, and return their row numbers."""
        first, self._rows = self._rows, self._rows + len(request.prompts)
        by_length: dict[int, list[int]] = defaultdict(list)
        for place, prompt in enumerate(request.prompts):
            by_length[len(prompt)].append(place)
        for _, places in sorted(by_length.items()):
            size = request.batch_size or len(places)
            for start in range(0, len(places), size):
                self._waiting.append(_Batch(request, places[start : start + size], first))
        return range(first, self._rows)

    def step(self) -> SampledTokens | None:
        """Sample a token for each row of the current batch, or of the next one; None when all are finished.

        The result has no rows if only other ranks of the expert-parallel group still decode.
        """
        largest = partial(parallel_groups.largest_of_expert_ranks, config=self.model.config)
        with evaluation_mode(self.model.chunks):
            if self._batch is None:
                if self._waiting:
                    batch = self._waiting.popleft()
                else:  # a token that is dropped, for passes that only other expert-parallel ranks need
                    keys_B, greedy = torch.zeros(1, dtype=torch.long), SamplingParams(greedy=True)
                    batch = _Batch(GenerationRequest([[0]], keys_B, 0, [StopConditions()], greedy), [0], 0)
                    batch.open = {}
                steps = largest(batch.bound)
                if not steps:
                    return None
                batch.start(self.model, steps, keeps_routes=self.keeps_routes)
                self._batch = batch
            sampled = self._batch.step(self.vocab_size)
        if not largest(len(self._batch.open)):
            self._batch = None
        return sampled

    def reread(self) -> None:
        """Drop the cache: the next step recomputes it over all tokens so far, with the current weights."""
        if (batch := self._batch) is not None:
            steps = batch.steps - len(batch.new_tokens[0])
            batch.start(self.model, steps, keeps_routes=self.keeps_routes)


class _Batch:
    """Rows that are decoded together. A finished row keeps running, unreported, until all are finished.

    places: the rows' indices in the request. first_row: the number of the request's first row in the session.
    """

    def __init__(self, request: GenerationRequest, places: list[int], first_row: int):
        self._sampling = request.sampling
        # Maximum number of tokens of a response.
        self.bound = bound_of(request.max_new_tokens, request.longest, len(request.prompts[places[0]]))
        # The place in the batch of each unfinished row, by the session's row number.
        self.open = {first_row + place: number for number, place in enumerate(places)}
        self.new_tokens: list[list[int]] = [[] for _ in places]
        self._stops = [request.stops[place] for place in places]
        self._sequences_BL = torch.tensor([list(request.prompts[place]) for place in places])
        self._keys_B = request.keys_B[places]

    def start(self, model: ForwardBackward, steps: int, *, keeps_routes: bool) -> None:
        """Start a new, empty cache for `steps` more tokens, which may be more than the batch's own bound."""
        self.steps, device = len(self.new_tokens[0]) + steps, accelerator.device()
        self._sequences_BL, self._keys_B = self._sequences_BL.to(device), self._keys_B.to(device)
        rows, length = self._sequences_BL.shape
        self._routes: list[torch.Tensor] | None = [] if keeps_routes else None
        self._next_logits = next_logits(model, rows, length + steps, self._routes)

    def step(self, vocab_size: int) -> SampledTokens:
        drawn = len(self.new_tokens[0])
        activity.advance(f"token {drawn + 1} of an answer")
        tokens_B, logprobs_B = sample_tokens(
            # Without the padding rows of the embedding.
            self._next_logits(self._sequences_BL)[:, :vocab_size],
            keyed_uniforms(self._keys_B, drawn),
            self._sampling,
        )
        self._sequences_BL = torch.cat([self._sequences_BL, tokens_B.unsqueeze(1)], dim=1)
        for new_tokens, token in zip(self.new_tokens, tokens_B.tolist(), strict=True):
            new_tokens.append(token)
        rows, places = [*self.open], [*self.open.values()]
        stopped = [self._stops[place].met_by(self.new_tokens[place]) for place in places]
        at_limit, routes = drawn + 1 == self.bound, dict[int, torch.Tensor]()
        for row, ends in zip(rows, stopped, strict=True):
            if ends or at_limit:
                place = self.open.pop(row)
                if self._routes is not None:
                    routes[row] = torch.cat([part[place] for part in self._routes]).cpu()
        at = torch.tensor(places, dtype=torch.long)
        return SampledTokens(
            torch.tensor(rows, dtype=torch.long),
            tokens_B.cpu()[at],
            logprobs_B.cpu()[at],
            torch.tensor(stopped, dtype=torch.bool),
            routes,
        )
