"""Play episodes, turning prompts into scored rows for training.

Shapes: B rows (prompts x samples), P longest prompt, T new tokens, S longest prompt with its response.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import ROUTED_EXPERTS
from nemo_rl_mcore.data.chat import Observer
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.driver import activity
from nemo_rl_mcore.driver.rollouts.transcript import (
    DIGESTS,
    RESPONSES,
    REWARDS_PREFIX,
    WEIGHT_VERSIONS,
    Piece,
    Transcript,
    batch_of,
    concatenate_batches,
    dropped_rows,
    episode_replies,
    first_rows,
    padded,
    tokens_of,
)
from nemo_rl_mcore.environment.turns import Ending, Reply, Turn, conversation
from nemo_rl_mcore.errors import RefusedError, RunStoppedError


class GenerationInterface(Protocol):
    """An engine that answers prompts; `update_weights` and `offload` do nothing unless they are overridden."""

    def generate(self, data: BatchedDataDict, *, step: int, greedy: bool = False) -> BatchedDataDict:
        """Answer prompts; return tokens int64 [B, T], logprobs fp32 [B, T], lengths [B], finished bool [B].

        Optional results: digests int64 [B] of each row's tokens, taken where they were sampled; weight_versions int64
        [B, T]; routed_experts, a list of `Response.routes`.
        A row's noise depends only on (seed, step, prompt_index, sample_index, turn_index).

        data: input_ids [B, P], input_lengths [B], prompt_index and sample_index int64 [B]; optionally turn_index int64
        [B], 0 for an episode's first answer, and stop_strings, a list with one tuple per row, added to the recipe's.
        """
        ...

    def update_weights(self, version: int) -> None:
        """Wake and load the policy's current weights under this version number, which never decreases."""

    def offload(self) -> None:
        """Sleep until the next `update_weights`, leaving any shared memory to training."""


class Environments(Protocol):
    """A run's environments; each turn gets a reply or is dropped, even if an environment dies."""

    async def replies_soon(self, turns: Sequence[Turn]) -> Sequence[Reply]:
        """Return a reply to each turn, in order, without blocking the event loop; any error raised ends the run."""
        ...

    def replies(self, turns: Sequence[Turn]) -> Sequence[Reply]:
        """Return the same replies as `replies_soon`, but block the calling thread until they arrive."""
        ...

    def take_counts(self) -> Mapping[str, float]:
        """Return counts since the last call, named `env/NAME`: turns dropped and retried, environments restarted."""
        ...

    @property
    def drop_reasons(self) -> Mapping[str, int]:
        """Number of turns dropped since the run began, by reason."""
        ...


@dataclass(frozen=True)
class EnvironmentsByName(Environments):
    """Gives each turn to the environment of its prompt; by_name: the environments by `Prompt.env_name`."""

    by_name: Mapping[str, Environments]

    def replies(self, turns: Sequence[Turn]) -> list[Reply]:
        parts = self._parts(turns)
        return self._joined(turns, parts, [self.by_name[name].replies(own) for name, own in parts.items()])

    async def replies_soon(self, turns: Sequence[Turn]) -> list[Reply]:
        parts = self._parts(turns)
        asked = (self.by_name[name].replies_soon(own) for name, own in parts.items())
        return self._joined(turns, parts, await asyncio.gather(*asked))

    def take_counts(self) -> dict[str, float]:
        """Return the sums and, if there are several environments, each one's counts as `env/ENVIRONMENT/NAME`."""
        total, found = Counter[str](), dict[str, float]()
        for name, environments in self.by_name.items():
            counts = environments.take_counts()
            total.update(counts)
            found |= {in_environment(key, name): count for key, count in counts.items()}
        return found | total

    @property
    def drop_reasons(self) -> Counter[str]:
        total = Counter[str]()
        for environments in self.by_name.values():
            total.update(environments.drop_reasons)
        return total

    @staticmethod
    def _parts(turns: Sequence[Turn]) -> dict[str, list[Turn]]:
        parts = dict[str, list[Turn]]()
        for turn in turns:
            parts.setdefault(turn.prompt.env_name, []).append(turn)
        return parts

    @staticmethod
    def _joined(
        turns: Sequence[Turn], names: Iterable[str], replies: Iterable[Sequence[Reply]]
    ) -> list[Reply]:
        coming = {name: iter(own) for name, own in zip(names, replies, strict=True)}
        return [next(coming[turn.prompt.env_name]) for turn in turns]


def in_environment(metric: str, name: str) -> str:
    """Return the name of a metric that is measured in one environment: train/reward is train/env/math/reward."""
    first, _, rest = metric.partition("/")
    return "/".join(filter(None, (first, "env" if first != "env" else "", name, rest))) if name else metric


@dataclass(frozen=True)
class EpisodeForm:
    """An episode's bounds and the encoder of its observations.

    turns: maximum number of answers. tokens: maximum sequence length. new_tokens: tokens to reserve for each answer.
    observer: encodes observations; None for single-answer episodes.
    """

    turns: int
    tokens: int
    new_tokens: int
    observer: Observer | None


ONE_ANSWER = EpisodeForm(turns=1, tokens=0, new_tokens=0, observer=None)
"""An episode that ends after its first answer."""


@dataclass
class _Episode(Transcript):
    prompt: Prompt
    messages: list[Message]
    turns: int = 0
    metadata: Any = None
    stop_strings: tuple[str, ...] = ()


class Episodes:
    """Episodes that advance together: call `asked`, `answer` and `hear` once per turn, then `batch`."""

    def __init__(
        self, prompts: Sequence[Prompt], asked: BatchedDataDict, tokenizer: Tokenizer, form: EpisodeForm
    ) -> None:
        """Begin an episode for each row of `asked`, the result of `Responder.ask` for these prompts."""
        self._first, self._tokenizer, self._form = asked, tokenizer, form
        self._digests, self._turn = False, 0
        samples = asked.size // len(prompts)
        columns = (asked[name].numpy() for name in ("sample_index", "input_lengths", "input_ids"))
        self._rows: list[_Episode] = []
        for row, (sample, length, ids_P) in enumerate(zip(*columns, strict=True)):
            prompt, shown = prompts[row // samples], Piece(ids_P[:length])
            self._rows.append(_Episode(prompt.index, int(sample), [[shown]], prompt, [*conversation(prompt)]))
        self._open = self._rows
        """Episodes that have not ended."""

    def asked(self) -> BatchedDataDict | None:
        """Return the input for `GenerationInterface.generate` for all open episodes; None once all have ended."""
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

    def answer(self, answered: BatchedDataDict) -> list[Turn]:
        """Add the answers to `asked`; return the turns that need a reply from the environment."""
        self._turn += 1
        self._digests = DIGESTS in answered
        routes: Sequence[Any] = answered.get(ROUTED_EXPERTS, ())
        columns = answered.without(ROUTED_EXPERTS).items()
        given: dict[str, NDArray[Any]] = {name: column.numpy() for name, column in columns}
        for place, row in enumerate(self._open):
            of_tokens = slice(given["lengths"][place])
            ids_N, logprobs_N = given["tokens"][place, of_tokens], given["logprobs"][place, of_tokens]
            versions_N = given[WEIGHT_VERSIONS][place, of_tokens] if WEIGHT_VERSIONS in given else -1
            row.rows[-1].append(Piece(ids_N, self._turn, logprobs_N, versions_N))
            if routes:
                row.routes[len(row.rows) - 1] = routes[place]
            row.digests += [int(given[DIGESTS][place])] if self._digests else []
            row.turns, row.finished = self._turn, bool(given["finished"][place])
            text = self._tokenizer.decode(ids_N.tolist())
            row.response = text if self._turn == 1 else None
            row.messages.append(Message("assistant", text))
        return [Turn(row.prompt, tuple(row.messages), row.finished, row.metadata) for row in self._open]

    def hear(self, replies: Sequence[Reply]) -> None:
        """Add the replies, in the order of the turns; raises ValueError if there are more or fewer replies than turns.

        An episode is dropped if its observation cannot be encoded; its last reply then contains the reason.
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
        """Append the observation, or begin a new row if the template rewrites the tokens before it."""
        assert self._form.observer is not None  # episodes of one answer have already ended
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
        pad, turns = self._tokenizer.pad_token_id, self._form.turns
        return batch_of(self._rows, pad_token_id=pad, turns=turns, digests=self._digests)


@dataclass(frozen=True)
class Rollout:
    """Answered and scored prompts, row by row.

    batch: input_ids [B, S], input_lengths [B], token_mask [B, S] (1 on sampled tokens), sample_mask [B] (0 for an
    episode that is dropped or not scored), generation_logprobs [B, S], prompt_index and sample_index [B], rewards [B],
    ending int64 [B] (`turns.Ending`), finished bool [B] (True if the episode was terminated), replies (for each
    row, a list of `turns.Reply.to_json` results). Optional columns: weight_versions int64 [B, S] (-1 on tokens
    that were not sampled), sampled_digests int64 [B, turns], turn_of_token int64 [B, S] (counted from 1; 0 on tokens
    that were not sampled), `rewards/NAME` [B], responses (texts, or None if not yet decoded), episode_index int64 [B]
    (rows with the same number form one episode, in the order in which they were played), routed_experts (of engines).
    """

    batch: BatchedDataDict
    prompts: list[Prompt]
    responses: list[str]

    @property
    def environment_rewards(self) -> torch.Tensor:
        batch = self.batch
        return batch["environment_rewards" if "environment_rewards" in batch else "rewards"]

    def by_environment(self) -> dict[str, Rollout]:
        """Return each environment's rows, with its own named rewards; all under an empty name if there is only one."""
        rows = dict[str, list[int]]()
        for row, prompt in enumerate(self.prompts):
            rows.setdefault(prompt.env_name, []).append(row)
        if len(rows) == 1:
            return dict.fromkeys(rows, self)
        parts = dict[str, Rollout]()
        for name, own in rows.items():
            batch = self.batch.select_indices(own)
            given = {
                f"{REWARDS_PREFIX}{key}"
                for reply in episode_replies(batch)
                for key in reply.get("rewards", ())
            }
            kept = [key for key in batch if key in given or not key.startswith(REWARDS_PREFIX)]
            batch = BatchedDataDict({key: batch[key] for key in kept})
            parts[name] = Rollout(
                batch, [self.prompts[row] for row in own], [self.responses[row] for row in own]
            )
        return parts

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
    """Sends prompts to a generation engine."""

    generation: GenerationInterface
    tokenizer: Tokenizer
    max_prompt_length: int
    form: EpisodeForm = field(default=ONE_ANSWER, kw_only=True)

    def respond(self, prompts: Sequence[Prompt], samples: int, *, step: int, greedy: bool = False) -> Rollout:
        """Answer each prompt `samples` times, in a single turn without reward; raise as `ask` does."""
        asked = self.ask(prompts, samples)
        episodes = Episodes(prompts, asked, self.tokenizer, self.form)
        episodes.answer(self.generation.generate(asked, step=step, greedy=greedy))
        return self.as_rollout(prompts, episodes.batch())

    def ask(self, prompts: Sequence[Prompt], samples: int) -> BatchedDataDict:
        """Return the input for `GenerationInterface.generate` for `samples` answers to each prompt, in adjacent rows.

        Raises ValueError, naming the prompt and the key, if a prompt is empty or longer than the maximum.
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
        rows, pad = [torch.tensor(row) for row in ids], self.tokenizer.pad_token_id
        batch = BatchedDataDict(
            input_ids=pad_sequence(rows, batch_first=True, padding_value=pad),
            input_lengths=torch.tensor([len(row) for row in ids]),
            prompt_index=torch.tensor([prompt.index for prompt in prompts]),
        )
        asked = batch.repeat_interleave(samples)
        asked["sample_index"] = torch.arange(samples).repeat(len(prompts))
        return asked

    def is_answer_to(self, asked: BatchedDataDict, batch: BatchedDataDict) -> bool:
        """Return True if each episode in `batch` begins with the prompt in the same row of `asked`."""
        shown = asked["input_ids"]
        first = [rows.start for rows in batch.samples()]
        return torch.equal(batch["input_ids"][first, : shown.shape[1]], shown)

    def as_rollout(self, prompts: Sequence[Prompt], batch: BatchedDataDict) -> Rollout:
        """Return a batch as a rollout, with its responses' texts; each prompt must have equally many episodes."""
        episodes = batch.samples()
        samples = len(episodes) // len(prompts)
        of_rows = [prompts[number // samples] for number, rows in enumerate(episodes) for _ in rows]
        # Decode each row from its first to its last sampled token, including observations in between.
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
    """Plays episodes between a generation engine and an environment.

    max_drop_rate: share of an environment's episodes that may be dropped in a step or a `collect` call.
    """

    environments: Environments
    max_drop_rate: float = field(default=0.0, kw_only=True)

    def collect(self, prompts: Sequence[Prompt], samples: int, *, step: int, greedy: bool = False) -> Rollout:
        """Play and score `samples` episodes per prompt; raise RunStoppedError if too many are dropped."""
        batch = self.play_now(prompts, self.ask(prompts, samples), step=step, greedy=greedy)
        rollout = self.as_rollout(prompts, batch)
        self.check_drops(step, [rollout])
        return rollout

    def play_now(
        self, prompts: Sequence[Prompt], asked: BatchedDataDict, *, step: int, greedy: bool = False
    ) -> BatchedDataDict:
        """Play episodes that begin with `asked` in the calling thread, with one engine call per turn; see `play`."""
        episodes = Episodes(prompts, asked, self.tokenizer, self.form)
        while (asking := episodes.asked()) is not None:
            turns = episodes.answer(self.generation.generate(asking, step=step, greedy=greedy))
            # Environments run user code, so their time counts toward a stall, even in an untimed validation.
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
        """Play episodes that begin with `asked`, turn by turn; `respond` returns a turn's answers."""
        episodes = Episodes(prompts, asked, self.tokenizer, self.form)
        while (asking := episodes.asked()) is not None:
            heard = await self.environments.replies_soon(episodes.answer(await respond(asking)))
            if self.form.observer is None:
                episodes.hear(heard)
            else:  # encoding observations may take seconds and must not block the event loop
                await asyncio.to_thread(episodes.hear, heard)
        return episodes.batch()

    def check_drops(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Raise RunStoppedError, naming the most frequent reason, if an environment dropped too many of its episodes.

        rollouts: all rollouts of a step.
        """
        parts = dict[str, list[BatchedDataDict]]()
        for rollout in rollouts:
            for name, part in rollout.by_environment().items():
                parts.setdefault(name, []).append(part.batch)
        for name, batches in parts.items():
            self._check_drops(f"step {step}{name and f', env.{name}'}", batches)

    def _check_drops(self, where: str, batches: Sequence[BatchedDataDict]) -> None:
        of_batches = [dropped_rows(batch)[first_rows(batch)] for batch in batches]
        dropped, episodes = sum(int(of_one.sum()) for of_one in of_batches), sum(map(len, of_batches))
        if dropped <= self.max_drop_rate * episodes:
            return
        replies = (reply for batch in batches for reply in episode_replies(batch))
        of_replies = Counter(reply["dropped"] for reply in replies if "dropped" in reply)
        since = self.environments.drop_reasons
        reasons = {reason: since.get(reason, count) for reason, count in of_replies.items()}
        most = max(reasons, key=lambda reason: reasons[reason], default="")
        raise RunStoppedError(
            f"{where}: {dropped} of {episodes} episodes ({dropped / episodes:.1%}) were dropped, to which the "
            f"environment gave no reply, or one that cannot be encoded; env.pool.max_drop_rate: "
            f"{self.max_drop_rate:g} is the most"
            + (f"; most often: {most} ({reasons[most]} answers since the run began)" if most else ""),
            code="too-many-dropped",
        )
