"""Turn prompts into scored rows that can be trained on.

Shapes: B rows (prompts x samples), P longest prompt, T new tokens, S = longest prompt with its response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.chat import Observer
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.data.turns import Ending, Reply, Turn, conversation
from nemo_rl_mcore.driver.rollouts.transcript import (
    DIGESTS,
    RESPONSES,
    WEIGHT_VERSIONS,
    Piece,
    Transcript,
    batch_of,
    check_drops,
    concatenate_batches,
    padded,
    tokens_of,
)
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank import activity


class GenerationInterface(Protocol):
    """An engine that answers prompts: B rows, P prompt length, T new tokens."""

    def generate(self, data: BatchedDataDict, *, step: int, greedy: bool = False) -> BatchedDataDict:
        """Answer prompts: tokens int64 [B, T], logprobs fp32 [B, T], lengths [B], finished bool [B].

        Also digests int64 [B] of the tokens of each row, taken where they were drawn; see `data.token_digests`.

        data: input_ids [B, P], input_lengths [B], prompt_index and sample_index int64 [B]; optional are turn_index
        int64 [B], 0 for the first answer of an episode, and stop_strings, a list of a tuple a row, which end it besides
        those of the recipe. The noise of a row depends on (seed, step, prompt_index, sample_index, turn_index) alone.
        """
        ...

    def update_weights(self, version: int) -> None:
        """Wake, and answer with the policy's weights as they are now, called this version; versions never fall."""

    def offload(self) -> None:
        """Sleep until the next `update_weights`: where the two share memory, training has it."""


class Environments(Protocol):
    """The environments of a run, wherever they run: each turn has a reply, or is dropped, whatever becomes of them.

    Two ways to ask: a thread that trains must hear signals and say what it waits for, an asyncio loop must not block.
    """

    async def replies_soon(self, turns: Sequence[Turn]) -> Sequence[Reply]:
        """Return the reply to each turn, in their order, without blocking the loop. Raises what ends the run."""
        ...

    def replies(self, turns: Sequence[Turn]) -> Sequence[Reply]:
        """Do as `replies_soon`, for the thread that trains, which waits."""
        ...

    def take_counts(self) -> Mapping[str, float]:
        """Return counts since the last call, as `env/NAME`: turns dropped and asked again, environments restarted.

        Empty where none of it can happen.
        """
        ...

    @property
    def drop_reasons(self) -> Mapping[str, int]:
        """Turns that were dropped since the run began, by the reason."""
        ...


@dataclass(frozen=True)
class EpisodeForm:
    """The lengths that episodes may have, and what observations look like.

    turns: answers at most. tokens: of all that the model reads; new_tokens: that an answer needs. observer: None where
    there is one answer.
    """

    turns: int
    tokens: int
    new_tokens: int
    observer: Observer | None


ONE_ANSWER = EpisodeForm(turns=1, tokens=0, new_tokens=0, observer=None)
"""An episode that ends with its first answer, whatever would follow it."""


@dataclass
class _Episode(Transcript):
    prompt: Prompt
    messages: list[Message]
    turns: int = 0
    metadata: Any = None
    stop_strings: tuple[str, ...] = ()


class Episodes:
    """Episodes that advance together, a turn at a time: `asked`, `answer`, `turns`, `hear`, and so on to `batch`."""

    def __init__(
        self, prompts: Sequence[Prompt], asked: BatchedDataDict, tokenizer: Tokenizer, form: EpisodeForm
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
        self._open = self._rows
        """Those that go on."""

    def asked(self) -> BatchedDataDict | None:
        """Return what `GenerationInterface.generate` takes, for the rows that go on; None when all have ended."""
        if not self._turn:
            return self._first
        if not (rows := self._open):
            return None
        last, pad = [row.rows[-1] for row in rows], self._tokenizer.pad_token_id
        asked = BatchedDataDict(
            input_ids=padded(last, lambda piece: piece.ids_N, pad),
            input_lengths=torch.tensor([tokens_of(row) for row in last]),
            prompt_index=torch.tensor([row.prompt.index for row in rows]),
            sample_index=torch.tensor([row.sample for row in rows]),
            turn_index=torch.full((len(rows),), self._turn),
        )
        if any(row.stop_strings for row in rows):
            asked["stop_strings"] = [row.stop_strings for row in rows]
        return asked

    def answer(self, answered: BatchedDataDict) -> None:
        self._turn += 1
        self._given = frozenset(answered)
        given: dict[str, NDArray[Any]] = {name: column.numpy() for name, column in answered.items()}
        for place, row in enumerate(self._open):
            of_tokens = slice(given["lengths"][place])
            ids_N, logprobs_N = given["tokens"][place, of_tokens], given["logprobs"][place, of_tokens]
            versions_N = given[WEIGHT_VERSIONS][place, of_tokens] if WEIGHT_VERSIONS in given else -1
            row.rows[-1].append(Piece(ids_N, self._turn, logprobs_N, versions_N))
            row.digests += [int(given[DIGESTS][place])] if DIGESTS in given else []
            row.turns, row.finished = self._turn, bool(given["finished"][place])
            text = self._tokenizer.decode(ids_N.tolist())
            row.response = text if self._turn == 1 else None
            row.messages.append(Message("assistant", text))

    def turns(self) -> list[Turn]:
        return [Turn(row.prompt, tuple(row.messages), row.finished, row.metadata) for row in self._open]

    def hear(self, replies: Sequence[Reply]) -> None:
        """Take the replies, in the order of `turns`; raises ValueError when they are not as many.

        An episode whose observation cannot be encoded is dropped; its last reply says why.
        """
        for row, reply in zip(self._open, replies, strict=True):
            row.take(reply)
            row.metadata, row.stop_strings = reply.metadata, reply.stop_strings
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
        self._open = [row for row in self._open if row.ending is None]

    def _observe(self, row: _Episode, observation: tuple[Message, ...]) -> None:
        """Go on with what the environment shows, in a new row where the template rewrites what stood before it."""
        assert self._form.observer is not None  # an episode of one answer has ended
        try:
            whole = self._form.observer.whole_prompt(row.prompt, row.messages, observation)
            ids = whole or self._form.observer.ids_of(row.rows[-1][-1].ids_N.tolist(), observation)
        except ValueError as error:
            row.ending = Ending.DROPPED
            row.replies[-1]["dropped"] = f"what the environment observed: {error}"
            return
        if len(ids) + (0 if whole else tokens_of(row.rows[-1])) + self._form.new_tokens > self._form.tokens:
            row.ending = Ending.NO_ROOM
            return
        if whole:
            row.rows.append([])
        row.rows[-1].append(Piece(np.array(ids, dtype=np.int64)))
        row.messages += observation

    def batch(self) -> BatchedDataDict:
        versions, digests = WEIGHT_VERSIONS in self._given, DIGESTS in self._given
        pad, turns = self._tokenizer.pad_token_id, self._form.turns
        return batch_of(self._rows, pad_token_id=pad, turns=turns, versions=versions, digests=digests)


@dataclass(frozen=True)
class Rollout:
    """Answered and scored prompts, row by row.

    batch: input_ids [B, S], input_lengths [B], token_mask [B, S] (1 on sampled tokens), sample_mask [B] (0 for an
    episode that was dropped), generation_logprobs [B, S], prompt_index and sample_index [B], rewards [B], ending int64
    [B] (`data.turns.Ending`) and finished bool [B], whether it was terminated; replies, a list of what was said to each
    answer (`data.turns.Reply.to_json`). Engines that hold a copy of the weights add weight_versions int64 [B, S], of
    those that sampled each token, else -1; engines that say what they sampled, sampled_digests int64 [B, turns];
    several turns turn_of_token int64 [B, S], from 1 on, 0 where none was sampled; several rewards `rewards/NAME` [B];
    episodes of one answer responses, texts or None where they are still to be decoded. With episode_index int64 [B]
    rows of equal numbers are one episode, in the order in which they were played, and what is said of an episode stands
    on all of them.
    """

    batch: BatchedDataDict
    prompts: list[Prompt]
    responses: list[str]

    @property
    def environment_rewards(self) -> torch.Tensor:
        batch = self.batch
        return batch["environment_rewards" if "environment_rewards" in batch else "rewards"]

    @staticmethod
    def concatenate(parts: Sequence[Rollout], pad_token_id: int) -> Rollout:
        if len(parts) == 1:
            return parts[0]
        return Rollout(
            concatenate_batches([part.batch for part in parts], pad_token_id),
            [prompt for part in parts for prompt in part.prompts],
            [response for part in parts for response in part.responses],
        )


def prompt_lengths(batch: BatchedDataDict) -> torch.Tensor:
    """Count the tokens before the first answer, int64 [B]."""
    mask = batch["token_mask"]
    return torch.where(mask.any(1), mask.argmax(1), batch["input_lengths"])


@dataclass(frozen=True)
class Responder:
    """Asks a generation engine for responses."""

    generation: GenerationInterface
    tokenizer: Tokenizer
    max_prompt_length: int
    form: EpisodeForm = field(default=ONE_ANSWER, kw_only=True)

    def respond(self, prompts: Sequence[Prompt], samples: int, *, step: int, greedy: bool = False) -> Rollout:
        """Answer each prompt `samples` times, once, without rewards; raises as `ask`."""
        asked = self.ask(prompts, samples)
        episodes = self.episodes(prompts, asked)
        episodes.answer(self.generation.generate(asked, step=step, greedy=greedy))
        return self.as_rollout(prompts, episodes.batch())

    def episodes(self, prompts: Sequence[Prompt], asked: BatchedDataDict) -> Episodes:
        samples = asked.size // len(prompts)
        of_rows = [prompt for prompt in prompts for _ in range(samples)]
        return Episodes(of_rows, asked, self.tokenizer, self.form)

    def ask(self, prompts: Sequence[Prompt], samples: int) -> BatchedDataDict:
        """Return what `GenerationInterface.generate` takes, for `samples` answers to each prompt, in rows side by side.

        Raises ValueError, naming the prompt and the key, when a prompt is longer than the maximum.
        """
        ids: list[list[int]] = []
        for prompt in prompts:
            tokens = self.tokenizer.encode(prompt.text, prompt.literal)
            if not 0 < len(tokens) <= self.max_prompt_length:
                raise RefusedError(
                    f"prompt {prompt.index} has {len(tokens)} tokens; prompts must have 1 to {self.max_prompt_length}: "
                    f"shorten it or raise data.max_input_seq_length ({prompt.text[:80]!r})",
                    code="prompt-length",
                )
            ids.append(tokens)
        lengths = torch.tensor([len(row) for row in ids])
        input_ids = torch.full((len(ids), int(lengths.max())), self.tokenizer.pad_token_id)
        for row, tokens in enumerate(ids):
            input_ids[row, : len(tokens)] = torch.tensor(tokens)
        indices = torch.tensor([prompt.index for prompt in prompts])
        batch = BatchedDataDict(input_ids=input_ids, input_lengths=lengths, prompt_index=indices)
        asked = batch.repeat_interleave(samples)
        asked["sample_index"] = torch.arange(samples).repeat(len(prompts))
        return asked

    def is_answer_to(self, asked: BatchedDataDict, batch: BatchedDataDict) -> bool:
        """Say whether episodes begin with what was asked, row by row."""
        shown = asked["input_ids"]
        first = [rows.start for rows in batch.samples()]
        return torch.equal(batch["input_ids"][first, : shown.shape[1]], shown)

    def as_rollout(self, prompts: Sequence[Prompt], batch: BatchedDataDict) -> Rollout:
        """Read what was answered, as often to each prompt, from the joined rows."""
        episodes = batch.samples()
        samples = len(episodes) // len(prompts)
        of_rows = [prompts[number // samples] for number, rows in enumerate(episodes) for _ in rows]
        # The text of each row's answer, or of all after its prompt, where observations stand in between.
        ids_BS, sampled_BS = batch["input_ids"].numpy(), batch["token_mask"].numpy() != 0
        first_B, end_B = sampled_BS.argmax(1), sampled_BS.shape[1] - sampled_BS[:, ::-1].argmax(1)
        counts = sampled_BS.sum(1).tolist()
        responses: list[str] = []
        for row, text in enumerate(batch.get(RESPONSES, [None] * batch.size)):
            if text is None:
                ids = ids_BS[row, first_B[row] : end_B[row]].tolist()
                decode = self.tokenizer.decode if len(ids) == counts[row] else self.tokenizer.text_of
                text = decode(ids) if counts[row] else ""
            responses.append(text)
        return Rollout(batch, of_rows, responses)


@dataclass(frozen=True)
class RolloutCollector(Responder):
    """Asks a generation engine for answers and an environment for replies, in turn."""

    environments: Environments
    max_drop_rate: float = field(default=0.0, kw_only=True)
    """Share of the episodes of a step, or of a call of `collect`, that may be dropped."""

    def collect(self, prompts: Sequence[Prompt], samples: int, *, step: int, greedy: bool = False) -> Rollout:
        """Play an episode from each prompt `samples` times, scored; RunStoppedError where too many were dropped."""
        batch = self.play_now(prompts, self.ask(prompts, samples), step=step, greedy=greedy)
        self.check_drops(step, [batch])
        return self.as_rollout(prompts, batch)

    def play_now(
        self, prompts: Sequence[Prompt], asked: BatchedDataDict, *, step: int, greedy: bool = False
    ) -> BatchedDataDict:
        """Play episodes that begin with `asked` in this thread, the answers of each turn in one call; see `play`."""
        episodes = self.episodes(prompts, asked)
        while (asking := episodes.asked()) is not None:
            episodes.answer(self.generation.generate(asking, step=step, greedy=greedy))
            turns = episodes.turns()
            # Whose code may be anybody's: the time counts also where that of a validation does not.
            with activity.at(f"scoring {len(turns)} responses", timed=True):
                heard = self.environments.replies(turns)
            episodes.hear(heard)
        return episodes.batch()

    async def play(
        self,
        prompts: Sequence[Prompt],
        asked: BatchedDataDict,
        respond: Callable[[BatchedDataDict], Awaitable[BatchedDataDict]],
    ) -> BatchedDataDict:
        """Play episodes that begin with `asked`, turn by turn; `respond` gives the answers of a turn."""
        episodes = self.episodes(prompts, asked)
        while (asking := episodes.asked()) is not None:
            episodes.answer(await respond(asking))
            heard = await self.environments.replies_soon(episodes.turns())
            if self.form.observer is None:
                episodes.hear(heard)
            else:  # encoding observations may take seconds that an event loop does not have
                await asyncio.to_thread(episodes.hear, heard)
        return episodes.batch()

    def check_drops(self, step: int, batches: Sequence[BatchedDataDict]) -> None:
        check_drops(step, batches, self.max_drop_rate, self.environments.drop_reasons)
