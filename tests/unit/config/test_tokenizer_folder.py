import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models

from nemo_rl_mcore.config import ConfigError, load_config
from nemo_rl_mcore.preflight import preflight
from nemo_rl_mcore.preflight.tokenizer_folder import tokenizer_problems

EXEMPLAR = Path(__file__).parents[3] / "examples/configs/grpo_copy_cpu.yaml"
WORDS = {"a": 0, "b": 1, "ab": 2}
MODELS = {
    "WordLevel": models.WordLevel(WORDS, unk_token="a"),
    "WordPiece": models.WordPiece(WORDS, unk_token="a"),
    "BPE": models.BPE(WORDS, [("a", "b")]),
    "Unigram": models.Unigram([("a", 0.0), ("b", -1.0), ("ab", -2.0)], 0),
}


def problems_of(folder: Path, vocab_size: int) -> list[str]:
    given = [f"policy.tokenizer.name={folder}", f"policy.model.vocab_size={vocab_size}"]
    return [str(problem) for problem in tokenizer_problems(load_config(EXEMPLAR, given).policy)]


def write(folder: Path, content: object, name: str = "tokenizer.json") -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("added", "rows"), [([], 3), (["b", "<eos>", "<pad>"], 5)])
def test_the_rows_are_those_that_the_library_counts(tmp_path, kind, added, rows):
    tokenizer = Tokenizer(MODELS[kind])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in added])
    assert tokenizer.get_vocab_size() == rows
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert problems_of(tmp_path, rows) == []
    assert problems_of(tmp_path, rows - 1) == [
        f"policy.model.vocab_size: {rows - 1} is below the {rows} ids of policy.tokenizer.name: "
        f"{str(tmp_path)!r}; set vocab_size: {rows}"
    ]


def test_ids_with_gaps_need_rows_up_to_the_highest(tmp_path):
    write(tmp_path, {"added_tokens": [], "model": {"vocab": {"a": 0, "b": 50}}})
    assert problems_of(tmp_path, 51) == []
    assert "50 is below the 51 ids" in problems_of(tmp_path, 50)[0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "not JSON: Expecting value"),
        ("{", "not JSON"),
        ([], "should be an object"),
        ({}, "added_tokens: Field required"),
        ({"added_tokens": []}, "model: Field required"),
        ({"added_tokens": [3], "model": {"vocab": {}}}, "added_tokens.0: "),
        ({"added_tokens": [], "model": {}}, "model.vocab: Field required"),
        ({"added_tokens": [], "model": {"vocab": {"a": "x"}}}, "model.vocab."),
    ],
)
def test_a_file_that_the_library_would_refuse_is_refused(tmp_path, content, reason):
    write(tmp_path, content)
    (problem,) = problems_of(tmp_path, 32)
    assert problem.startswith(f"policy.tokenizer.name: {str(tmp_path / 'tokenizer.json')!r} is not what")
    assert reason in problem
    assert "name a local Hugging Face tokenizer folder, or set it to char" in problem


def test_bytes_that_are_not_text_and_folders_in_place_of_files_are_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe{}")
    assert "not JSON" in problems_of(tmp_path, 32)[0]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").mkdir()
    assert "cannot be read: no regular file" in problems_of(tmp_path, 32)[0]


@pytest.mark.parametrize("content", ["{", []])
def test_settings_that_are_not_an_object_are_refused(tmp_path, content):
    write(tmp_path, content, "tokenizer_config.json")
    assert "tokenizer_config.json' is not what a tokenizer is saved as" in problems_of(tmp_path, 32)[0]


def test_a_folder_without_tokenizer_json_is_left_to_the_libraries(tmp_path):
    write(tmp_path, {"tokenizer_class": "LlamaTokenizer"}, "tokenizer_config.json")
    assert problems_of(tmp_path, 1) == []


def test_the_preflight_compares_with_the_model_of_the_recipe(load, tmp_path):
    write(tmp_path, {"added_tokens": [], "model": {"vocab": {"a": 0, "b": 32}}})
    with pytest.raises(
        ConfigError, match=r"policy\.model\.vocab_size: 32 is below the 33 ids of policy\.tokenizer"
    ):
        preflight(load(f"policy.tokenizer.name={tmp_path}"))
    assert preflight(load(f"policy.tokenizer.name={tmp_path}", "policy.model.vocab_size=33"))
