"""Turn prompts into scored rows that can be trained on.

Shapes: B rows (prompts x samples), P longest prompt, T new tokens, S = longest prompt with its response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.data.turns import Reply, Turn
from nemo_rl_mcore.driver.interfaces import Environments, GenerationInterface
from nemo_rl_mcore.driver.rollouts.episodes import ONE_ANSWER, EpisodeForm, Episodes
from nemo_rl_mcore.driver.rollouts.metrics import check_drops
from nemo_rl_mcore.driver.rollouts.transcript import RESPONSES, WEIGHT_VERSIONS, with_equal_columns
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank import activity


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
        """Return the rewards [B] as they were before they were shaped."""
        batch = self.batch
        return batch["environment_rewards" if "environment_rewards" in batch else "rewards"]

    @staticmethod
    def concatenate(parts: Sequence[Rollout], pad_token_id: int) -> Rollout:
        """Return all rows of the parts, padded to the longest; of one part itself."""
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


def concatenate_batches(parts: Sequence[BatchedDataDict], pad_token_id: int) -> BatchedDataDict:
    """Return all rows of batches such as those of `Rollout`, padded to the longest."""
    return BatchedDataDict.from_batches(
        with_equal_columns(parts), {"input_ids": pad_token_id, WEIGHT_VERSIONS: -1}
    )


@dataclass(frozen=True)
class Responder:
    """Asks a generation engine for responses."""

    generation: GenerationInterface
    tokenizer: Tokenizer
    max_prompt_length: int
    form: EpisodeForm = field(default=ONE_ANSWER, kw_only=True)

    def respond(self, prompts: Sequence[Prompt], samples: int, *, step: int, greedy: bool = False) -> Rollout:
        """Answer each prompt `samples` times, once, without rewards; the rows of a prompt stand together.

        Raises ValueError, naming the prompt and the key, when a prompt is longer than the maximum.
        """
        asked = self.ask(prompts, samples)
        episodes = self.episodes(prompts, asked)
        episodes.answer(self.generation.generate(asked, step=step, greedy=greedy))
        return self.as_rollout(prompts, episodes.batch())

    def episodes(self, prompts: Sequence[Prompt], asked: BatchedDataDict) -> Episodes:
        """Return the episodes that begin with what `ask` gave for these prompts."""
        samples = asked.size // len(prompts)
        of_rows = [prompt for prompt in prompts for _ in range(samples)]
        return Episodes(of_rows, asked, self.tokenizer, self.form)

    def ask(self, prompts: Sequence[Prompt], samples: int) -> BatchedDataDict:
        """Return what `GenerationInterface.generate` takes, for `samples` answers to each prompt; see `respond`."""
        ids = [self._encode(prompt) for prompt in prompts]
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
        spans = zip(ids_BS, first_B.tolist(), end_B.tolist(), sampled_BS.sum(1).tolist(), strict=True)

        def read(ids_S: NDArray[np.int64], first: int, end: int, count: int) -> str:
            decode = self.tokenizer.decode if end - first == count else self.tokenizer.text_of
            return decode(ids_S[first:end].tolist()) if count else ""

        known: Sequence[str | None] = batch.get(RESPONSES, [None] * batch.size)
        responses = [read(*span) if text is None else text for text, span in zip(known, spans, strict=True)]
        return Rollout(batch, of_rows, responses)

    def _encode(self, prompt: Prompt) -> list[int]:
        ids = self.tokenizer.encode(prompt.text, prompt.literal)
        if not 0 < len(ids) <= self.max_prompt_length:
            raise RefusedError(
                f"prompt {prompt.index} has {len(ids)} tokens; prompts must have 1 to {self.max_prompt_length}: "
                f"shorten it or raise data.max_input_seq_length ({prompt.text[:80]!r})",
                code="prompt-length",
            )
        return ids


@dataclass(frozen=True)
class RolloutCollector(Responder):
    """Asks a generation engine for answers and an environment for replies, in turn."""

    environments: Environments
    max_drop_rate: float = field(default=0.0, kw_only=True)
    """Share of the episodes of a step, or of a call of `collect`, that may be dropped."""

    def collect(self, prompts: Sequence[Prompt], samples: int, *, step: int, greedy: bool = False) -> Rollout:
        """Play an episode from each prompt `samples` times, scored; greedy answers are for judging.

        Raises RunStoppedError where more episodes were dropped than may be.
        """
        batch = self.play_now(prompts, self.ask(prompts, samples), step=step, greedy=greedy)
        self.check_drops(step, [batch])
        return self.as_rollout(prompts, batch)

    def play_now(
        self, prompts: Sequence[Prompt], asked: BatchedDataDict, *, step: int, greedy: bool = False
    ) -> BatchedDataDict:
        """Play episodes that begin with `asked` in this thread, the answers of each turn in one call; see `play`."""

        async def respond(asking: BatchedDataDict) -> BatchedDataDict:
            return self.generation.generate(asking, step=step, greedy=greedy)

        async def replies(turns: Sequence[Turn]) -> Sequence[Reply]:
            # Whose code may be anybody's: the time counts also where that of a validation does not.
            with activity.at(f"scoring {len(turns)} responses", timed=True):
                return self.environments.replies(turns)

        return _ended(self.play(prompts, asked, respond, replies, apart=_here))

    def check_drops(self, step: int, batches: Sequence[BatchedDataDict]) -> None:
        """See `episode_metrics.check_drops`."""
        check_drops(step, batches, self.max_drop_rate, self.environments.drop_reasons)

    async def play(
        self,
        prompts: Sequence[Prompt],
        asked: BatchedDataDict,
        respond: Callable[[BatchedDataDict], Awaitable[BatchedDataDict]],
        replies: Callable[[Sequence[Turn]], Awaitable[Sequence[Reply]]] | None = None,
        *,
        apart: Callable[..., Awaitable[object]] = asyncio.to_thread,
    ) -> BatchedDataDict:
        """Play episodes that begin with `asked`, turn by turn; `respond` gives the answers of a turn.

        replies: in place of `Environments.replies_soon`. apart: where observations are encoded, which may take seconds
        that an event loop does not have.
        """
        episodes, replies = self.episodes(prompts, asked), replies or self.environments.replies_soon
        while (asking := episodes.asked()) is not None:
            episodes.answer(await respond(asking))
            heard = await replies(episodes.turns())
            if self.form.observer is None:
                episodes.hear(heard)
            else:
                await apart(episodes.hear, heard)
        return episodes.batch()


async def _here(call: Callable[..., None], *args: object) -> None:
    call(*args)


def _ended[Result](coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine whose every wait is over when it returns: in this thread, which hears signals as ever."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError("an episode of a synchronous step waits for an event loop")
