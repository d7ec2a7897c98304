import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from chat_templates import byte_tokenizer
from chat_tokenizer import chat_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused
from rows_of_files import EXEMPLAR
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Words
from transformers import PreTrainedTokenizerFast

from nemo_rl_mcore.data.hub import CHAR_VOCABULARY, end_ids, fetched_folder
from nemo_rl_mcore.data.tokenizer import CharTokenizer, StopConditions, Tokenizer, load_tokenizer, token_texts
from nemo_rl_mcore.recipe.load import load_config

PAD, EOS = 16, 15


@pytest.fixture(scope="session")
def bytes_(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def test_char_tokenizer_has_32_one_character_tokens() -> None:
    tokenizer = load_tokenizer("char")
    assert tokenizer.vocab_size == 32 == len(set(CHAR_VOCABULARY))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD, EOS)
    assert tokenizer.encode("527>") == [5, 2, 7, 12]
    ordinary = [i for i in range(32) if i not in (PAD, EOS)]
    text = tokenizer.decode(ordinary)
    assert len(text) == 30
    assert tokenizer.encode(text) == ordinary


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([5, 2, EOS, PAD, PAD], "52"),
        ([5, 2, EOS, 7, EOS], "52"),
        ([5, 2, PAD, PAD], "52"),
        ([EOS], ""),
        ([], ""),
        ([5, PAD, 7, EOS], "5_7"),  # a sampled pad keeps its position
    ],
)
def test_decode_stops_at_the_end_of_sequence_and_drops_padding(ids: list[int], text: str) -> None:
    assert load_tokenizer("char").decode(ids) == text


def test_pad_and_end_may_be_the_same_id() -> None:
    assert load_tokenizer("char", ends=[PAD]).decode([1, 2, PAD, PAD, PAD]) == "12"


@pytest.mark.parametrize("end", [1, 2, 3])
def test_what_follows_any_end_of_a_response_is_cut_off_with_it(tmp_path: Path, end: int) -> None:
    """The tokenizer's own, the model's, and those of the recipe that are special; a stop that is text stays."""
    save_hugging_face_tokenizer(tmp_path, pad_token="<pad>", eos_token="<eos>")
    plain = load_tokenizer(str(tmp_path))
    tokenizer = load_tokenizer(str(tmp_path), ends=[1, 3], stops=[2, 5])
    assert (plain.ends, tokenizer.ends) == ((1,), (1, 3, 2))
    said = tokenizer.encode("56")
    assert tokenizer.decode([*said, end, *said]) == "56"
    assert tokenizer.decode([*said, 5, 0]) == "562"
    assert load_tokenizer("char", ends=[30]).decode([5, 30, 7, EOS]) == "5"


@pytest.mark.parametrize(("ends", "written"), [([], None), ([1], None), ([4], [1, 4])])
def test_further_ends_are_saved_with_the_tokenizer(tmp_path: Path, ends: list[int], written: object) -> None:
    save_hugging_face_tokenizer(tmp_path / "one", pad_token="<pad>", eos_token="<eos>")
    load_tokenizer(str(tmp_path / "one"), ends=ends).save_as_hugging_face(tmp_path / "two")
    path = tmp_path / "two/generation_config.json"
    assert (json.loads(path.read_text())["eos_token_id"] if path.exists() else None) == written
    assert list(end_ids(None, str(tmp_path / "two"))) == (written or [])


@pytest.mark.parametrize("text", ["5 2", "5A", "52$", "5_2", "é"])
def test_foreign_and_special_characters_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot encode"):
        load_tokenizer("char").encode(text)


@pytest.mark.stage("processes")
def test_importing_and_the_char_tokenizer_need_no_heavy_library() -> None:
    code = (
        "import sys\n"
        "import nemo_rl_mcore.data.tokenizer as t\n"
        "assert 'tokenizers' not in sys.modules\n"
        "t.load_tokenizer('char').encode('12')\n"
        "assert not {'transformers', 'torch'} & set(sys.modules), 'heavy import'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["no/such/dir", "gpt2"])
def test_a_missing_directory_names_the_path_and_the_key(name: str) -> None:
    with refused("no-tokenizer", f"policy.tokenizer.name: '{name}'"):
        load_tokenizer(name)


SAVED = {
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "<eos>": 1}, "unk_token": "<unk>"},
}
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}


@pytest.mark.parametrize(
    ("saved", "settings"),
    [
        ({}, SETTINGS),
        ([], SETTINGS),
        ({"added_tokens": []}, SETTINGS),
        ({**SAVED, "added_tokens": [3]}, SETTINGS),
        ({**SAVED, "model": {"type": "WordLevel"}}, SETTINGS),
        (SAVED, []),
        (SAVED, {**SETTINGS, "eos_token": 3}),
    ],
)
def test_a_broken_file_names_the_key_and_the_folder(tmp_path: Path, saved: object, settings: object) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with refused("unreadable-tokenizer", "policy.tokenizer.name", tmp_path) as caught:
        load_tokenizer(str(tmp_path))
    assert caught.value.__cause__ is not None


def save_hugging_face_tokenizer(directory: Path, **special_tokens: str) -> None:
    words = ["<pad>", "<eos>", "<think>", *"0123456789+= "]
    tokenizer = Words(models.WordLevel({word: i for i, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=["<think>"], **special_tokens
    )
    fast.save_pretrained(directory)


def test_hugging_face_directory_round_trip(tmp_path: Path) -> None:
    save_hugging_face_tokenizer(tmp_path / "one", pad_token="<pad>", eos_token="<eos>")
    loaded = load_tokenizer(str(tmp_path / "one"))
    loaded.save_as_hugging_face(tmp_path / "two")
    for tokenizer in (loaded, load_tokenizer(str(tmp_path / "two"))):
        ids = tokenizer.encode("12 + 3 =")
        assert (tokenizer.vocab_size, tokenizer.pad_token_id, tokenizer.eos_token_id) == (16, 0, 1)
        assert not {0, 1} & set(ids)
        assert tokenizer.decode([*ids, 1, 0, 0]) == "12 + 3 ="
        assert tokenizer.decode([2, *ids]) == "<think>12 + 3 ="


def test_hugging_face_without_pad_uses_the_end_and_without_end_is_refused(tmp_path: Path) -> None:
    save_hugging_face_tokenizer(tmp_path / "no_pad", eos_token="<eos>")
    assert load_tokenizer(str(tmp_path / "no_pad")).pad_token_id == 1
    save_hugging_face_tokenizer(tmp_path / "no_eos", pad_token="<pad>")
    with refused("no-end-token", "policy.tokenizer.name"):
        load_tokenizer(str(tmp_path / "no_eos"))


def test_the_char_tokenizer_is_saved_as_one_that_transformers_loads(tmp_path: Path) -> None:
    ours = load_tokenizer("char")
    ours.save_as_hugging_face(tmp_path)
    theirs = load_tokenizer(str(tmp_path))
    assert (theirs.vocab_size, theirs.pad_token_id, theirs.eos_token_id) == (32, PAD, EOS)
    text = ours.decode([i for i in range(32) if i not in (PAD, EOS)])
    assert theirs.encode(text) == ours.encode(text)
    for ids in ([5, PAD, 7, EOS, 3], [*range(15), PAD], [EOS], [30, 0, 31]):
        assert theirs.decode(ids) == ours.decode(ids)


def word_tokenizer(folder: Path, splits: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """Whole words, and one token for all others."""
    known = {word: i for i, word in enumerate(["<unk>", "<end>", "the", "answer", " "])}
    words = Words(models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = splits
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>").save_pretrained(
        folder
    )
    return load_tokenizer(str(folder))


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_text_is_fewer_tokens_than_its_length_tells(bytes_: Tokenizer, text: str) -> None:
    assert bytes_.fewest_tokens(len(text)) <= len(bytes_.encode(text))


def test_what_the_length_of_a_text_tells(tmp_path: Path, bytes_: Tokenizer) -> None:
    longest = max(len(bytes_.text_of([token])) for token in range(bytes_.vocab_size))
    assert bytes_.fewest_tokens(3 * longest) == 3
    assert bytes_.fewest_tokens(3 * longest + 1) == 4
    assert load_tokenizer("char").fewest_tokens(5) == 5
    apart = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    assert word_tokenizer(tmp_path / "letters", apart).fewest_tokens(12) == 2
    for name, splits in (("words", pre_tokenizers.Whitespace()), ("runs", pre_tokenizers.WhitespaceSplit())):
        assert word_tokenizer(tmp_path / name, splits).fewest_tokens(10**9) == 0


BLANK = "\u2581"
PIECES = ["<unk>", BLANK, f"{BLANK}a", f"{BLANK}the", "a", "b", "1", "2", ".", "東"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


class LlamaPieces:
    """Pieces with their blanks, and bytes for the rest: the first blank of a text is not shown."""

    def __init__(self):
        pieces = [*PIECES, *BYTES]
        self._tokenizer = Words(
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


class ByteTokenizer:
    """One token a byte, as a byte-level tokenizer falls back to: a character may be several tokens."""

    def __init__(self):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self._tokenizer = Words(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()

    def encode(self, text):
        return self._tokenizer.encode(text).ids

    def text_of(self, ids):
        return self._tokenizer.decode(ids)


def end_of(tokens, stops):
    """How many tokens a response has; None if nothing ends it."""
    return next((end for end in range(1, len(tokens) + 1) if stops.met_by(tokens[:end])), None)


@pytest.mark.parametrize("tokenizer", [CharTokenizer(), ByteTokenizer()], ids=["characters", "bytes"])
@pytest.mark.parametrize(
    ("text", "strings", "end"),
    [
        ("12+3=a", ("3=",), 5),
        ("12+3=a", ("=a", "2"), 2),
        ("12+3=a", ("=3", "aa"), None),
        ("abcdefgh" * 3, ("hab",), 10),
        ("abc", ("abcd", "c"), 3),
    ],
)
def test_a_text_ends_a_response_at_the_token_that_completes_it(tokenizer, text, strings, end):
    assert end_of(tokenizer.encode(text), StopConditions(frozenset(), strings, tokenizer)) == end


def test_a_character_of_several_tokens_is_found_when_its_last_one_comes():
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("naïve 東京 x")
    assert len(tokens) > 11
    end = end_of(tokens, StopConditions(frozenset(), ("東京",), tokenizer))
    assert tokenizer.text_of(tokens[:end]) == "naïve 東京"


def test_an_id_ends_a_response_without_a_tokenizer():
    assert end_of([3, 5, 4, 5], StopConditions(frozenset({4, 9}))) == 3


def test_the_tokenizer_is_loaded_for_texts_alone(tmp_path):
    def policy(name, strings):
        policy = load_config(EXEMPLAR).policy
        generation = policy.generation.model_copy(update={"stop_strings": strings})
        tokenizer = policy.tokenizer.model_copy(update={"name": name})
        return policy.model_copy(update={"generation": generation, "tokenizer": tokenizer})

    missing = str(tmp_path / "nowhere")
    assert StopConditions.of(policy(missing, None), [1]) == StopConditions(frozenset({1}))
    with pytest.raises(ValueError, match=r"policy\.tokenizer\.name"):
        StopConditions.of(policy(missing, ("a",)), [1])
    assert end_of([1, 2, 3], StopConditions.of(policy("char", ("2",)), [])) == 2


def test_a_string_may_end_in_the_text_of_padding_or_hold_that_of_the_end():
    tokenizer = CharTokenizer()
    padded = [*tokenizer.encode("12"), tokenizer.pad_token_id, *tokenizer.encode("3")]
    text = tokenizer.text_of([tokenizer.pad_token_id])
    assert end_of(padded, StopConditions(strings=(f"2{text}",), tokenizer=tokenizer)) == 3
    ended = [*tokenizer.encode("1"), tokenizer.eos_token_id, *tokenizer.encode("2")]
    text = tokenizer.text_of([tokenizer.eos_token_id])
    assert end_of(ended, StopConditions(strings=(f"{text}2",), tokenizer=tokenizer)) == 3


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """The snapshot of `me/model` in a cache, with a config and nothing else, on a machine without a network."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "models--me--model"
    folder = model / "snapshots/abc"
    folder.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text("abc")
    (folder / "config.json").write_text("{}")
    return folder


def test_a_whole_snapshot_needs_no_network(snapshot):
    (snapshot / "model.safetensors").touch()
    assert fetched_folder("me/model") == snapshot


def test_a_snapshot_is_whole_when_every_file_of_its_index_is_there(snapshot):
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (snapshot / files["a"]).touch()
    with refused("incomplete-model", "me/model"):
        fetched_folder("me/model")
    (snapshot / files["b"]).touch()
    assert fetched_folder("me/model") == snapshot


@pytest.mark.parametrize("name", ["me/model", "me/unknown"])
def test_what_cannot_be_fetched_is_named_with_the_way_out(snapshot, name):
    with refused("incomplete-model", f"policy.model_name: '{name}'"):
        fetched_folder(name)
