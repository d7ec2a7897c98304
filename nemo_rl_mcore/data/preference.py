"""Pairs of a better and a worse answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.data.chat import conversation_row
from nemo_rl_mcore.data.datasets import Prompt, PromptSource
from nemo_rl_mcore.data.literal_text import Rendered
from nemo_rl_mcore.data.messages import NO_EXTRAS, Extras, Message
from nemo_rl_mcore.data.token_rows import TokenRow, plain_row, rows_as_batch
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.errors import RefusedError


@dataclass(frozen=True)
class Preference:
    """A prompt, the answer to move towards and the one to move away from."""

    index: int
    prompt: str
    chosen: str
    rejected: str
    context: tuple[Message, ...] = ()
    """The conversation after the prompt; empty where it is plain text."""
    literal: tuple[tuple[int, int], ...] = ()
    """See `Prompt.literal`."""
    extras: Extras = NO_EXTRAS
    """See `Prompt.extras`."""


def preference_rows(preferences: Sequence[Preference], tokenizer: Tokenizer) -> BatchedDataDict:
    """Return rows as `rows_as_batch` gives them: the chosen answer of each pair, then the rejected one."""
    rows = [row for pair in preferences for row in pair_rows(pair, tokenizer)]
    indices = [pair.index for pair in preferences for _ in range(2)]
    return rows_as_batch(rows, indices, tokenizer.pad_token_id)


def pair_rows(pair: Preference, tokenizer: Tokenizer) -> tuple[TokenRow, TokenRow]:
    """Return the chosen and the rejected row of a pair, in each of which the answer is to be trained on."""

    def row(answer: str, message: Message | None) -> TokenRow:
        if not pair.context:
            return plain_row(Rendered(pair.prompt, pair.literal), answer, tokenizer)
        said = message or answer
        return conversation_row(pair.context, said, tokenizer, imitate_all=False, extras=pair.extras)

    return row(pair.chosen, pair.extras.answer), row(pair.rejected, pair.extras.rejected)


class PreferenceSource(ABC):
    """Where the pairs of a DPO run come from: one of each prompt, in 2 rows, chosen then rejected."""

    def __init__(self, prompts: PromptSource, tokenizer: Tokenizer) -> None:
        self.prompts = prompts
        self._tokenizer = tokenizer

    @abstractmethod
    def pair(self, prompt: Prompt) -> Preference:
        """Return the pair of a prompt."""

    def train_batch(self, step: int, pairs: int) -> BatchedDataDict:
        """Draw different pairs; the same (seed, step) gives the same ones."""
        return self.rows(self.prompts.train_batch(step, pairs))

    def first_steps(self, step: int, pairs: int) -> Sequence[int] | None:
        """Return the first step of each pair of a step, see `PromptSource.first_steps`."""
        return self.prompts.first_steps(step, pairs)

    def rows(self, prompts: Sequence[Prompt]) -> BatchedDataDict:
        """Return the pairs of prompts, see `preference_rows`."""
        return preference_rows([self.pair(prompt) for prompt in prompts], self._tokenizer)


class WrongAnswerPairs(PreferenceSource):
    """Pairs of an embedded task: the right answer against one with its first and last character changed places.

    Where these are equal, the last digit is another one.
    """

    def pair(self, prompt: Prompt) -> Preference:
        """See `PreferenceSource.pair`."""
        right = prompt.answer
        wrong = right[-1] + right[1:-1] + right[0]
        if len(right) == 1 or wrong == right:
            wrong = right[:-1] + str((int(right[-1]) + 1) % 10)
        return Preference(prompt.index, prompt.text, right, wrong)


class GivenPairs(PreferenceSource):
    """The pairs of a data set: its answers against those that it says to move away from."""

    def pair(self, prompt: Prompt) -> Preference:
        """See `PreferenceSource.pair`; ValueError when the prompt has none."""
        return given_pair(prompt)


def given_pair(prompt: Prompt) -> Preference:
    """Return the pair that a prompt of a data set holds; ValueError when it holds none."""
    if prompt.rejected is None:
        raise RefusedError(
            f"prompt {prompt.index} has no rejected answer, which DPO needs unless dpo.online: true",
            code="no-rejected-answer",
        )
    return Preference(
        prompt.index,
        prompt.text,
        prompt.imitated,
        prompt.rejected,
        prompt.context,
        prompt.literal,
        prompt.extras,
    )
