"""The text of each token of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from nemo_rl_mcore.data.tokenizer import Tokenizer

_NO_CHARACTER = "\ufffd"
_BYTES = 4
"""Of the longest character: so many tokens may be parts of one."""


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Text of each of N ids; joined, and to the letter, that is `tokenizer.text_of(ids)`.

    Of tokens that are a character together the last one has it and the others have "", but for one behind bytes that
    are none: any of its tokens may have it.
    """
    whole, end = tokenizer.text_of(ids), 0
    alone = {token: tokenizer.text_of([token]) for token in set(ids)}
    ends: list[int] = []
    before = first = 0
    """Where the tokens that were given their text last begin, and those that wait for it."""
    for last, token in enumerate(ids, start=1):
        text = alone[token]
        if first + 1 < last or not _is_next(text, whole, end):
            # Some decoders take the space from the first token that they see: it is another one here.
            known = len(tokenizer.text_of(ids[before:first]))
            text = tokenizer.text_of(ids[before:last])[known:]
        if _is_next(text, whole, end) or last - first == _BYTES:
            end = min(end + len(text), len(whole))
            before, first = first, last
        ends.append(end)
    return [whole[start:stop] for start, stop in pairwise([0, *ends[:-1], len(whole)])] if ids else []


def _is_next(text: str, whole: str, start: int) -> bool:
    """Whether a text is all that some tokens stand for, and not the beginning of a character."""
    return bool(text) and not text.endswith(_NO_CHARACTER) and whole.startswith(text, start)
