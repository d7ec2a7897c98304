"""Encodes what `literal_text` marks: special tokens of a Hugging Face tokenizer that are text."""

# transformers leaves parameters of its tokenizer classes untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from nemo_rl_mcore.data.literal_text import MASK, Spans

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase

_ANCHOR = f"{MASK}the text goes on{MASK}"


class LiteralEncoder:
    """Encodes texts of which some special tokens are content, with a tokenizer of transformers.

    Between the special tokens that are none of the content, each stretch that holds one of the content is encoded with
    all special tokens as text; the others are encoded as ever. Tokens that are added and not special are parsed in
    both.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = {token.content: token for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.tokens: tuple[str, ...] = tuple(dict.fromkeys((*added, *map(str, tokenizer.all_special_tokens))))
        """The texts of the special tokens."""
        patterns = [
            ("\\s*" if token in added and added[token].lstrip else "")
            + re.escape(token)
            + ("\\s*" if token in added and added[token].rstrip else "")
            for token in sorted(self.tokens, key=len, reverse=True)
        ]
        self._real = re.compile("|".join(patterns))
        known: dict[str, int] = tokenizer.get_vocab()
        self._control = frozenset(
            known[token] for token in self.tokens if token in known and token != tokenizer.unk_token
        )

    def encode(self, text: str, literal: Spans) -> list[int]:
        """Return the ids; ValueError for a token that the tokenizer knows no other ids for than its control id."""
        ids = list[int]()
        for start, end, spans in _stretches(text, literal, self._real):
            if spans:
                ids += self._as_text(text, start, end, spans)
            else:
                ids += self._tokenizer.encode(text[start:end], add_special_tokens=False)
        return ids

    def _as_text(self, text: str, start: int, end: int, spans: Spans) -> list[int]:
        ids = self._plain(text[start:end], goes_on=start > 0)
        if self._control.isdisjoint(ids):
            return ids
        # The vocabulary holds the token as a word, too: of its parts there is none.
        cuts = [start, *(first + 1 for first, _ in spans), end]
        parts = [self._plain(text[one:two], goes_on=one > 0) for one, two in pairwise(cuts)]
        ids = [token for part in parts for token in part]
        if not self._control.isdisjoint(ids):
            shown = text[slice(*spans[0])]
            raise ValueError(f"the tokenizer cannot encode the special token {shown!r} as text")
        return ids

    def _plain(self, text: str, *, goes_on: bool) -> list[int]:
        """Return the ids of a text without any special token; goes_on: it stands after another one."""
        if self._backend is None:
            return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        anchor = _ANCHOR if goes_on and self._marks_the_start else ""
        if anchor and anchor in text:
            raise ValueError(f"the tokenizer cannot encode {_ANCHOR!r}")
        # A batch, since other threads run on while that is encoded.
        [encoded] = self._backend.encode_batch([anchor + text], add_special_tokens=False)
        return encoded.ids[1:] if anchor else encoded.ids

    @cached_property
    def _backend(self) -> Backend | None:
        """Return a copy of the tokenizer to which no token is special; None where it is not of `tokenizers`."""
        from tokenizers import AddedToken, Tokenizer
        from transformers import PreTrainedTokenizerFast

        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            return None
        copy = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        copy.encode_special_tokens = True
        copy.no_truncation()
        copy.no_padding()
        if self._marks_the_start:
            copy.add_tokens([AddedToken(_ANCHOR, normalized=False, special=False)])
        return copy

    @cached_property
    def _marks_the_start(self) -> bool:
        """Return whether the first word of a text has other ids than a word after a special token."""
        encode, token = self._tokenizer.encode, self.tokens[0]
        alone, behind = (encode(text, add_special_tokens=False) for text in ("word", f"{token}word"))
        return behind[1:] != alone


def _stretches(text: str, literal: Spans, real: re.Pattern[str]) -> Iterator[tuple[int, int, Spans]]:
    """Yield the parts of a text, those between two special tokens with what is literal in them alone."""
    masked = list(text)
    for start, end in literal:
        masked[start:end] = MASK * (end - start)
    borders = [found.span() for found in real.finditer("".join(masked))]
    starts, ends = [0, *(end for _, end in borders)], [*(start for start, _ in borders), len(text)]
    done, place = 0, 0
    for start, end in zip(starts, ends, strict=True):
        held = list[tuple[int, int]]()
        while place < len(literal) and literal[place][0] < end:
            held.append(literal[place])
            place += 1
        if not held:
            continue
        if done < start:
            yield done, start, ()
        yield start, end, held
        done = end
    if done < len(text):
        yield done, len(text), ()
