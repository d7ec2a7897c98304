"""Text for a model in which content spells special tokens: where they stand, for they are to be encoded as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from nemo_rl_mcore.data.messages import Message

type Spans = Sequence[tuple[int, int]]
"""Places of a text, each from its first character to after its last one, in order."""
MASK = "\ue000"
"""A character that no special token has."""


@dataclass(frozen=True)
class Rendered:
    """A text for the model; `literal` are the special tokens in it that content spells."""

    text: str
    literal: tuple[tuple[int, int], ...] = ()

    def begins_with(self, beginning: Rendered) -> bool:
        """Return whether it begins with another text, the special tokens that content spells in both alike."""
        within = takewhile(lambda span: span[1] <= len(beginning.text), self.literal)
        return self.text.startswith(beginning.text) and tuple(within) == beginning.literal

    def part(self, start: int, end: int | None = None) -> Rendered:
        """Return what stands between two places of it."""
        end = len(self.text) if end is None else end
        inside = ((first - start, last - start) for first, last in self.literal if start <= first < end)
        return Rendered(self.text[start:end], tuple(inside))


def framed_content(text: str, frame: tuple[int, int]) -> tuple[str, str, str]:
    """Part a text into what a file of the recipe says before the content, the content, and what it says after."""
    before, end = frame[0], len(text) - frame[1]
    return text[:before], text[before:end], text[end:]


def contents(messages: Iterable[Message]) -> Iterator[str]:
    """Yield what messages say that no file of the recipe does, their roles among it."""
    said = list[str]()
    for message in messages:
        message.with_texts(lambda text: said.append(text) or text)
    yield from filter(None, said)


def literal_spans(
    text: str, tokens: Sequence[str], frame: tuple[int, int] = (0, 0)
) -> tuple[tuple[int, int], ...]:
    """Find the special tokens that the content of a text spells; see `framed_content`."""
    if not tokens:
        return ()
    before, content, _ = framed_content(text, frame)
    start = len(before)
    return tuple(
        (start + found.start(), start + found.end()) for found in pattern_of(tuple(tokens)).finditer(content)
    )


@lru_cache(maxsize=16)
def pattern_of(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Return what finds special tokens as tokenizers do: from the left, the longest one."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


class Seal:
    """Puts marks in the place of special tokens while a chat template renders, and the tokens back after it."""

    def __init__(self, tokens: Sequence[str], texts: Sequence[str]) -> None:
        """Choose marks that no one of `texts` holds."""
        self._pattern, self._places = pattern_of(tuple(tokens)), {token: i for i, token in enumerate(tokens)}
        self._tokens = tokens
        number = 0
        while any(f"{MASK}{number}." in text for text in texts):
            number += 1
        self._mark = f"{MASK}{number}."

    def close(self, text: str) -> str:
        """Put a mark in the place of each special token."""
        return self._pattern.sub(lambda found: f"{self._mark}{self._places[found[0]]}.", text)

    def open(self, text: str) -> Rendered:
        """Put the tokens back."""
        parts = re.split(rf"{re.escape(self._mark)}(\d+)\.", text)
        opened, literal, length = list[str](), list[tuple[int, int]](), 0
        for place, part in enumerate(parts):
            piece = self._tokens[int(part)] if place % 2 else part
            if place % 2:
                literal.append((length, length + len(piece)))
            opened.append(piece)
            length += len(piece)
        return Rendered("".join(opened), tuple(literal))
