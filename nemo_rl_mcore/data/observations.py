"""What an environment says, as tokens between two answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class PlainObserver:
    """Texts as they are."""

    tokenizer: Tokenizer

    def ids_of(self, answer_ids: Sequence[int], observation: Sequence[Message]) -> list[int]:
        """The ids of the texts, one after the other."""
        return [token for message in observation for token in self.tokenizer.encode(message.content)]


def make_observer(tokenizer: Tokenizer, *, chat: bool) -> PlainObserver:
    """The observer of a recipe; chat: prompts are shown by the tokenizer's chat template."""
    if chat:
        raise ValueError("data.apply_chat_template: episodes of several turns take plain texts")
    return PlainObserver(tokenizer)
