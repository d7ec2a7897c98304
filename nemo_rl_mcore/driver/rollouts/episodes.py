"""Episodes: answers of the model and observations in turn, until the environment or a limit ends them.

Shapes: B rows, P tokens at hand, T new tokens, S longest episode. No engine and no environment is called here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from nemo_rl_mcore.driver.rollouts.transcript import (
    DIGESTS,
    WEIGHT_VERSIONS,
    Piece,
    Transcript,
    batch_of,
    padded,
)


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
"""What comes after the answer to a prompt plays no part."""


@dataclass
class _Episode(Transcript):
    """An episode that is played, and what it goes on with."""

    prompt: Prompt
    messages: list[Message]
    turns: int = 0
    metadata: Any = None
    stop_strings: tuple[str, ...] = ()

    def take(self, reply: Reply) -> None:
        """See `Transcript.take`."""
        super().take(reply)
        self.metadata, self.stop_strings = reply.metadata, reply.stop_strings


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
            _Episode(prompt.index, sample, [[Piece(ids_P[:length])]], prompt, [*conversation(prompt)])
            for prompt, sample, ids_P, length in rows
        ]

    @property
    def _open(self) -> list[_Episode]:
        return [row for row in self._rows if row.ending is None]

    def asked(self) -> BatchedDataDict | None:
        """Return what `GenerationInterface.generate` takes, for the rows that go on; None when all have ended."""
        if not self._turn:
            return self._first
        rows = self._open
        if not rows:
            return None
        asked = BatchedDataDict(
            input_ids=padded(
                [row.pieces for row in rows], lambda piece: piece.ids_N, self._tokenizer.pad_token_id
            ),
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
            row.pieces.append(Piece(ids_N, self._turn, logprobs_N, versions_N))
            row.digests += [int(given[DIGESTS][place])] if DIGESTS in given else []
            row.turns, row.finished = self._turn, bool(given["finished"][place])
            text = self._tokenizer.decode(ids_N.tolist())
            row.response = text if self._turn == 1 else None
            row.messages.append(Message("assistant", text))

    def turns(self) -> list[Turn]:
        """Return what the environment is to reply to."""
        return [Turn(row.prompt, tuple(row.messages), row.finished, row.metadata) for row in self._open]

    def hear(self, replies: Sequence[Reply]) -> None:
        """Take the replies, in the order of `turns`; raises ValueError when they are not as many.

        An episode whose observation cannot be encoded is dropped; its last reply says why.
        """
        for row, reply in zip(self._open, replies, strict=True):
            row.take(reply)
            if reply.dropped is not None:
                row.ending = Ending.DROPPED
            elif reply.unscored:
                row.ending = Ending.UNSCORED
            elif not row.finished:
                row.ending = Ending.ANSWER_LIMIT
            elif reply.terminated:
                row.ending = Ending.TERMINATED
            elif row.turns == self._form.turns:
                row.ending = Ending.TURN_LIMIT
            else:
                self._observe(row, reply.observation)

    def _observe(self, row: _Episode, observation: tuple[Message, ...]) -> None:
        assert self._form.observer is not None  # an episode of one answer has ended
        try:
            whole = self._form.observer.whole_prompt(row.prompt, row.messages, observation)
            ids = whole or self._form.observer.ids_of(row.pieces[-1].ids_N.tolist(), observation)
        except ValueError as error:
            row.ending = Ending.DROPPED
            row.replies[-1]["dropped"] = f"what the environment observed: {error}"
            return
        if len(ids) + (0 if whole else row.length) + self._form.new_tokens > self._form.tokens:
            row.ending = Ending.NO_ROOM
            return
        if whole:
            row.rows.append([])
        row.pieces.append(Piece(np.array(ids, dtype=np.int64)))
        row.messages += observation

    def batch(self) -> BatchedDataDict:
        """Return all episodes, in the order of their prompts; the columns are those of `Rollout`, scored."""
        return batch_of(
            self._rows,
            pad_token_id=self._tokenizer.pad_token_id,
            turns=self._form.turns,
            versions=WEIGHT_VERSIONS in self._given,
            digests=DIGESTS in self._given,
        )
