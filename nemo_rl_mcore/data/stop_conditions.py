"""What ends a response: token ids, and texts that its tokens spell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data.tokenizer import Tokenizer, load_tokenizer

_tokenizer = cache(load_tokenizer)


@dataclass(frozen=True)
class StopConditions:
    """Ids and texts that end a response, and belong to it; texts need the tokenizer."""

    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = None

    @classmethod
    def of(cls, policy: PolicyConfig, ids: Iterable[int], more: Sequence[str] = ()) -> Self:
        """Return these ids, the texts of the configuration, and `more` of them.

        Raises ValueError when the tokenizer is needed and cannot be loaded.
        """
        strings = (*(policy.generation.stop_strings or ()), *more)
        return cls(frozenset(ids), strings, _tokenizer(policy.tokenizer.name) if strings else None)

    def met_by(self, tokens: Sequence[int]) -> bool:
        """Return whether the last of a response's tokens ends it."""
        if tokens[-1] in self.ids:
            return True
        if self.tokenizer is None:
            return False
        # A token is a byte at least, so that a text of n bytes lies within as many tokens; and a decoder may drop
        # the space that begins the first one.
        longest = max(len(string.encode()) for string in self.strings) + 1
        text = self.tokenizer.text_of(tokens[-longest:])
        return any(string in text for string in self.strings)
