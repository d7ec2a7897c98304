import json
import subprocess
import sys
from pathlib import Path

import pytest
from chat_templates import byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Words
from transformers import PreTrainedTokenizerFast

from nemo_rl_mcore.data.hub import CHAR_VOCABULARY, end_ids
from nemo_rl_mcore.data.tokenizer import Tokenizer, load_tokenizer

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


def test_decode_stops_at_the_end_of_sequence_and_drops_padding() -> None:
    tokenizer = load_tokenizer("char")
    assert tokenizer.decode([5, 2, EOS, PAD, PAD]) == "52"
    assert tokenizer.decode([5, 2, EOS, 7, EOS]) == "52"
    assert tokenizer.decode([5, 2, PAD, PAD]) == "52"
    assert tokenizer.decode([EOS]) == ""
    assert tokenizer.decode([]) == ""


def test_a_sampled_pad_inside_the_answer_keeps_its_position() -> None:
    assert load_tokenizer("char").decode([5, PAD, 7, EOS]) == "5_7"


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


def test_a_directory_without_a_tokenizer_names_the_key(tmp_path: Path) -> None:
    with refused("unreadable-tokenizer", "policy.tokenizer.name", tmp_path):
        load_tokenizer(str(tmp_path))


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
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<think>", *"0123456789+= "]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=["<think>"], **special_tokens
    )
    fast.save_pretrained(directory)


def test_hugging_face_directory_round_trip(tmp_path: Path) -> None:
    save_hugging_face_tokenizer(tmp_path, pad_token="<pad>", eos_token="<eos>")
    tokenizer = load_tokenizer(str(tmp_path))
    ids = tokenizer.encode("12 + 3 =")
    assert tokenizer.vocab_size == 16
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
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


def test_a_hugging_face_tokenizer_is_saved_as_it_was(tmp_path: Path) -> None:
    save_hugging_face_tokenizer(tmp_path / "one", pad_token="<pad>", eos_token="<eos>")
    loaded = load_tokenizer(str(tmp_path / "one"))
    loaded.save_as_hugging_face(tmp_path / "two")
    again = load_tokenizer(str(tmp_path / "two"))
    assert again.encode("12 + 3 =") == loaded.encode("12 + 3 =")
    assert (again.vocab_size, again.pad_token_id, again.eos_token_id) == (16, 0, 1)


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
