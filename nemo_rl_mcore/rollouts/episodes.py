"""Episodes: answers of the model and observations in turn, until the environment or a limit ends them.

Shapes: B rows, P tokens at hand, T new tokens, S longest episode. No engine and no environment is called here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.observations import Observer
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.data.turns import Ending, Reply, Turn, conversation

WEIGHT_VERSIONS = "weight_versions"
TURN_OF_TOKEN = "turn_of_token"
DIGESTS = "digests"
SAMPLED_DIGESTS = "sampled_digests"
REWARDS_PREFIX = "rewards/"
REPLIES = "replies"
_RECORDED = (WEIGHT_VERSIONS, TURN_OF_TOKEN, SAMPLED_DIGESTS, REPLIES)


@dataclass(frozen=True)
class EpisodeForm:
    """Says how long episodes may be, and what observations look like.

    turns: answers at most. tokens: of all that the model reads; new_tokens: that an answer needs. observer: None where
    there is one answer.
    """

    turns: int
    tokens: int
    new_tokens: int
    observer: Observer | None


ONE_ANSWER = EpisodeForm(turns=1, tokens=0, new_tokens=0, observer=None)
"""What comes behind the answer to a prompt plays no part."""


@dataclass(frozen=True)
class _Piece:
    """A prompt, an observation or an answer of N tokens, and what is known of each, or one number for all of them.

    No lists: they would have an object for each token of a step.
    """

    ids_N: NDArray[np.int64]
    turn: int = 0
    logprobs_N: NDArray[np.float32] | float = 0.0
    versions_N: NDArray[np.int64] | int = -1


@dataclass
class _Row:
    """An episode so far."""

    prompt: Prompt
    sample: int
    messages: list[Message]
    pieces: list[_Piece]
    turns: int = 0
    digests: list[int] = field(default_factory=list[int])
    finished: bool = False
    metadata: Any = None
    stop_strings: tuple[str, ...] = ()
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    replies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ending: Ending | None = None

    def take(self, reply: Reply) -> None:
        """Add up what the environment says of the last answer."""
        self.reward += reply.reward
        for name, reward in reply.rewards.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + reward
        self.metadata, self.stop_strings = reply.metadata, reply.stop_strings
        self.replies.append(reply.to_json())

    @property
    def length(self) -> int:
        """Return how many tokens it has so far."""
        return sum(len(piece.ids_N) for piece in self.pieces)


class Episodes:
    """Episodes that advance together, a turn at a time: `asked`, `answer`, `turns`, `hear`, and so on to `batch`."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        asked: BatchedDataDict,
        tokenizer: Tokenizer,
        form: EpisodeForm,
    ) -> None:
        """prompts: of each row; asked: input_ids [B, P], input_lengths, prompt_index and sample_index [B]."""
        self._first, self._tokenizer, self._form = asked, tokenizer, form
        self._given = frozenset[str]()
        """Columns of the answers."""
        self._turn = 0
        lengths, samples = asked["input_lengths"].tolist(), asked["sample_index"].tolist()
        rows = zip(prompts, samples, asked["input_ids"].numpy(), lengths, strict=True)
        self._rows = [
            _Row(prompt, sample, [*conversation(prompt)], [_Piece(ids_P[:length])])
            for prompt, sample, ids_P, length in rows
        ]

    @property
    def _open(self) -> list[_Row]:
        return [row for row in self._rows if row.ending is None]

    def asked(self) -> BatchedDataDict | None:
        """Return what `GenerationInterface.generate` takes, for the rows that go on; None when all have ended."""
        if not self._turn:
            return self._first
        rows = self._open
        if not rows:
            return None
        asked = BatchedDataDict(
            input_ids=self._input_ids(rows),
            input_lengths=torch.tensor([row.length for row in rows]),
            prompt_index=torch.tensor([row.prompt.index for row in rows]),
            sample_index=torch.tensor([row.sample for row in rows]),
            turn_index=torch.full((len(rows),), self._turn),
        )
        if any(row.stop_strings for row in rows):
            asked["stop_strings"] = [row.stop_strings for row in rows]
        return asked

    def answer(self, answered: BatchedDataDict) -> None:
        """Take the answers to what was asked, see `GenerationInterface.generate`."""
        self._turn += 1
        self._given = frozenset(answered)
        given: dict[str, NDArray[Any]] = {name: column.numpy() for name, column in answered.items()}
        for place, row in enumerate(self._open):
            of_tokens = slice(given["lengths"][place])
            ids_N, logprobs_N = given["tokens"][place, of_tokens], given["logprobs"][place, of_tokens]
            versions_N = given[WEIGHT_VERSIONS][place, of_tokens] if WEIGHT_VERSIONS in given else -1
            row.pieces.append(_Piece(ids_N, self._turn, logprobs_N, versions_N))
            row.digests += [int(given[DIGESTS][place])] if DIGESTS in given else []
            row.turns, row.finished = self._turn, bool(given["finished"][place])
            row.messages.append(Message("assistant", self._tokenizer.decode(ids_N.tolist())))

    def turns(self) -> list[Turn]:
        """Return what the environment is to reply to."""
        return [Turn(row.prompt, tuple(row.messages), row.finished, row.metadata) for row in self._open]

    def hear(self, replies: Sequence[Reply]) -> None:
        """Take the replies, in the order of `turns`; raises ValueError when they are not as many.

        An episode whose observation cannot be encoded is dropped; its last reply says why.
        """
        for row, reply in zip(self._open, replies, strict=True):
            row.take(reply)
            row.ending = self._ending(row, reply)
            if row.ending is None:
                self._observe(row, reply.observation)

    def _ending(self, row: _Row, reply: Reply) -> Ending | None:
        if reply.dropped is not None:
            return Ending.DROPPED
        if not row.finished:
            return Ending.ANSWER_LIMIT
        if reply.terminated:
            return Ending.TERMINATED
        return Ending.TURN_LIMIT if row.turns == self._form.turns else None

    def _observe(self, row: _Row, observation: tuple[Message, ...]) -> None:
        assert self._form.observer is not None  # an episode of one answer has ended
        try:
            ids = self._form.observer.ids_of(row.pieces[-1].ids_N.tolist(), observation)
        except ValueError as error:
            row.ending = Ending.DROPPED
            row.replies[-1]["dropped"] = f"what the environment observed: {error}"
            return
        if row.length + len(ids) + self._form.new_tokens > self._form.tokens:
            row.ending = Ending.NO_ROOM
            return
        row.pieces.append(_Piece(np.array(ids, dtype=np.int64)))
        row.messages += observation

    def batch(self) -> BatchedDataDict:
        """Return all episodes, in the order of their prompts; the columns are those of `Rollout`, scored."""
        rows = self._rows
        turn_of_token = _padded(rows, lambda piece: piece.turn, 0)
        ending = torch.tensor([int(row.ending or Ending.TERMINATED) for row in rows])
        dropped = ending == Ending.DROPPED
        return BatchedDataDict(
            input_ids=self._input_ids(rows),
            input_lengths=torch.tensor([row.length for row in rows]),
            token_mask=(turn_of_token > 0).float(),
            sample_mask=(~dropped).float(),
            generation_logprobs=_padded(rows, lambda piece: piece.logprobs_N, 0.0),
            finished=torch.tensor([row.finished for row in rows]) & (ending == Ending.TERMINATED),
            prompt_index=self._first["prompt_index"],
            sample_index=self._first["sample_index"],
            ending=ending,
            rewards=torch.tensor([row.reward for row in rows]).masked_fill(dropped, 0.0),
            **{REPLIES: [row.replies for row in rows]},
            **self._where_given(turn_of_token),
        )

    def _input_ids(self, rows: Sequence[_Row]) -> torch.Tensor:
        return _padded(rows, lambda piece: piece.ids_N, self._tokenizer.pad_token_id)

    def _where_given(self, turn_of_token: torch.Tensor) -> dict[str, torch.Tensor]:
        """The columns that depend on the run, the engine or the environment."""
        rows, turns = self._rows, self._form.turns
        columns = {TURN_OF_TOKEN: turn_of_token} if turns > 1 else {}
        if WEIGHT_VERSIONS in self._given:
            columns[WEIGHT_VERSIONS] = _padded(rows, lambda piece: piece.versions_N, -1)
        if DIGESTS in self._given:
            digests = [row.digests + [0] * (turns - len(row.digests)) for row in rows]
            columns[SAMPLED_DIGESTS] = torch.tensor(digests, dtype=torch.long)
        for name in sorted({name for row in rows for name in row.rewards}):
            columns[f"{REWARDS_PREFIX}{name}"] = torch.tensor([row.rewards.get(name, 0.0) for row in rows])
        return columns


def _padded(
    rows: Sequence[_Row], values: Callable[[_Piece], NDArray[Any] | float], fill: float
) -> torch.Tensor:
    """[B, S] of a value for each token, filled on the right: fp32 where `fill` is a float, else int64."""
    padded_BS = torch.full((len(rows), max(row.length for row in rows)), fill)
    for padded_S, row in zip(padded_BS.numpy(), rows, strict=True):
        start = 0
        for piece in row.pieces:
            padded_S[start : start + len(piece.ids_N)] = values(piece)
            start += len(piece.ids_N)
    return padded_BS


def sampled_versions(batch: BatchedDataDict) -> torch.Tensor:
    """Return weight_versions of sampled tokens alone, int64 [B, T], row by row from the left, -1 behind a row's end."""
    versions = batch[WEIGHT_VERSIONS]
    order = (versions < 0).long().argsort(dim=1, stable=True)
    return versions.gather(1, order)[:, : int((versions >= 0).sum(1).max())]


def with_equal_columns(batches: Sequence[BatchedDataDict]) -> list[BatchedDataDict]:
    """Give all batches the same rewards by name: zeros where all episodes were dropped, which names none."""
    names = dict.fromkeys(name for batch in batches for name in batch if name.startswith(REWARDS_PREFIX))
    return [
        BatchedDataDict({**batch, **{name: torch.zeros(batch.size) for name in names if name not in batch}})
        for batch in batches
    ]


def trained_columns(batch: BatchedDataDict) -> BatchedDataDict:
    """Return the batch without what is only recorded of its episodes, for the ranks."""
    return BatchedDataDict(
        {
            name: column
            for name, column in batch.items()
            if name not in _RECORDED and not name.startswith(REWARDS_PREFIX)
        }
    )
