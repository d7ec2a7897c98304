import random

import pytest
from chat_templates import byte_tokenizer
from chat_tokenizer import chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from nemo_rl_mcore.data.tokenizer import CharTokenizer, token_texts

BLANK = "\u2581"
PIECES = ["<unk>", BLANK, f"{BLANK}a", f"{BLANK}the", "a", "b", "1", "2", ".", "東"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


class LlamaPieces:
    """Pieces with their blanks, and bytes for the rest: the first blank of a text is not shown."""

    def __init__(self):
        pieces = [*PIECES, *BYTES]
        self._tokenizer = Tokenizer(
            models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>")
        )
        self._tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace(BLANK, " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        self.vocab_size, self.ids = len(pieces), {piece: i for i, piece in enumerate(pieces)}

    def text_of(self, ids):
        return self._tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "characters": CharTokenizer(),
        "chat": chat_tokenizer(folder / "chat"),
        "byte-level BPE": byte_tokenizer(folder / "bytes"),
        "byte fallback": LlamaPieces(),
    }


KINDS = ["characters", "chat", "byte-level BPE", "byte fallback"]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=100)
@given(drawn=st.lists(st.integers(0, 2**16), max_size=40))
def test_the_texts_of_any_ids_are_together_the_text_of_all(tokenizers, kind, drawn):
    tokenizer = tokenizers[kind]
    ids = [number % tokenizer.vocab_size for number in drawn]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.text_of(ids)


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=30))
def test_of_a_text_each_token_has_the_characters_that_its_bytes_complete(tokenizers, text):
    tokenizer = tokenizers["byte-level BPE"]
    ids = tokenizer.encode(text)
    shown, expected = "", []
    for end in range(1, len(ids) + 1):
        # A character that is itself the mark of none waits as well.
        now = tokenizer.text_of(ids[:end]).rstrip("\ufffd")
        expected.append(now.removeprefix(shown))
        shown = now
    if "\ufffd" not in text:
        assert token_texts(tokenizer, ids) == expected


def test_what_is_no_character_does_not_shift_what_follows(tokenizers):
    tokenizer = tokenizers["byte-level BPE"]
    cut_off = [*tokenizer.encode("😀")[:1] * 11, *tokenizer.encode("東!")]
    texts = token_texts(tokenizer, [*cut_off, *tokenizer.encode("Q7")])
    assert texts[-3:] == ["!", "Q", "7"]
    assert "".join(texts[:-3]) == "\ufffd" * 11 + "東"


def test_blanks_are_with_the_tokens_that_have_them(tokenizers):
    tokenizer = tokenizers["byte fallback"]
    pieces = [f"{BLANK}the", f"{BLANK}a", BLANK, "1", "2", BLANK, f"{BLANK}a", "東", "<0xC3>", "<0xA9>", "b"]
    texts = token_texts(tokenizer, [tokenizer.ids[piece] for piece in pieces])
    assert texts == ["the", " a", " ", "1", "2", " ", " a", "東", "", "é", "b"]


def test_an_answer_without_tokens_has_no_texts(tokenizers):
    assert token_texts(tokenizers["characters"], []) == []


@pytest.mark.parametrize("garbage", [False, True])
def test_the_calls_grow_with_the_tokens_and_not_with_their_square(tokenizers, garbage):
    tokenizer, decoded = tokenizers["byte-level BPE"], []

    class Counting:
        def text_of(self, ids):
            decoded.append(len(ids))
            return tokenizer.text_of(ids)

    cut_off = tokenizer.encode("😀")[:1]
    ids = cut_off * 600 if garbage else random.Random(0).choices(tokenizer.encode("plain words"), k=600)
    token_texts(Counting(), ids)
    assert sum(decoded) <= (12 if garbage else 2) * 600
