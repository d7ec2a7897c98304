"""Decoding through a training model, token by token.

Shapes: B rows that run together, P prompt length, L length so far, T new tokens, N rows that are not complete.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nemo_rl_mcore.data.stop_conditions import StopConditions
from nemo_rl_mcore.data.token_digests import digests_of_rows
from nemo_rl_mcore.ops.sampling import SamplingParams, at_temperature, keyed_uniforms, sample_tokens
from nemo_rl_mcore.rank import accelerator, activity
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.forward_backward import ForwardBackward, evaluation_mode
from nemo_rl_mcore.rank.megatron.next_logits import NextLogits, next_logits
from nemo_rl_mcore.rank.policy_backend import GeneratedRows, GenerationRequest, SampledTokens


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
    """Implements `training.policy_backend.Decoding`; between two steps requests may be added too.

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
