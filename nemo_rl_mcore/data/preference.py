"""Pairs of a better and a worse answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nemo_rl_mcore.data.answers import answered_rows
from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt, PromptSource
from nemo_rl_mcore.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Preference:
    """A prompt, the answer to move towards and the one to move away from."""

    index: int
    prompt: str
    chosen: str
    rejected: str


class PreferenceSource(Protocol):
    """Where the pairs of a DPO run come from: 2 rows a pair, chosen then rejected."""

    def train_batch(self, step: int, pairs: int) -> BatchedDataDict:
        """Draw different pairs; the same (seed, step) gives the same ones."""
        ...

    def validation(self, pairs: int) -> BatchedDataDict:
        """Give held-out pairs, the same ones at every call."""
        ...


def preference_rows(preferences: Sequence[Preference], tokenizer: Tokenizer) -> BatchedDataDict:
    """Rows as `answered_rows` gives them: the chosen answer of each pair, then the rejected one."""
    pairs = [(pair, answer) for pair in preferences for answer in (pair.chosen, pair.rejected)]
    return answered_rows(
        [pair.prompt for pair, _ in pairs],
        [answer for _, answer in pairs],
        [pair.index for pair, _ in pairs],
        tokenizer,
    )


@dataclass(frozen=True)
class WrongAnswerPairs:
    """Pairs of an embedded task: the right answer against one with its first and last character changed places.

    Where these are equal, the last digit is another one.
    """

    prompts: PromptSource
    tokenizer: Tokenizer

    def train_batch(self, step: int, pairs: int) -> BatchedDataDict:
        """See `PreferenceSource.train_batch`."""
        return preference_rows([_pair(p) for p in self.prompts.train_batch(step, pairs)], self.tokenizer)

    def validation(self, pairs: int) -> BatchedDataDict:
        """See `PreferenceSource.validation`."""
        return preference_rows([_pair(p) for p in self.prompts.validation(pairs)], self.tokenizer)


def _pair(prompt: Prompt) -> Preference:
    right = prompt.answer
    wrong = right[-1] + right[1:-1] + right[0]
    if len(right) == 1 or wrong == right:
        wrong = right[:-1] + str((int(right[-1]) + 1) % 10)
    return Preference(prompt.index, prompt.text, right, wrong)
