import json
from pathlib import Path

import pytest
from chat_templates import byte_tokenizer
from chat_tokenizer import TEMPLATE, VOCABULARY, save_chat_tokenizer
from refusals import briefs, wrong_key
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoTokenizer

from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.check.data import ends_of, special_tokens_of, tokenizer_problems, turn_problems
from nemo_rl_mcore.tools.check.render import subject_of

EXEMPLAR = Path(__file__).parents[4] / "examples/configs/grpo_copy_cpu.yaml"
WORDS = {"a": 0, "b": 1, "ab": 2}
MODELS = {
    "WordLevel": models.WordLevel(WORDS, unk_token="a"),
    "WordPiece": models.WordPiece(WORDS, unk_token="a"),
    "BPE": models.BPE(WORDS, [("a", "b")]),
    "Unigram": models.Unigram([("a", 0.0), ("b", -1.0), ("ab", -2.0)], 0),
}


def problems_of(folder: Path, vocab_size: int) -> list[str]:
    given = [f"policy.tokenizer.name={folder}", f"policy.model.vocab_size={vocab_size}"]
    return briefs(tokenizer_problems(load_config(EXEMPLAR, given).policy))


def write(folder: Path, content: object, name: str = "tokenizer.json") -> None:
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("added", "rows"), [([], 3), (["b", "<eos>", "<pad>"], 5)])
def test_the_rows_are_those_that_the_library_counts(tmp_path, kind, added, rows):
    tokenizer = Tokenizer(MODELS[kind])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in added])
    assert tokenizer.get_vocab_size() == rows
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert problems_of(tmp_path, rows) == []
    assert problems_of(tmp_path, rows - 1) == ["policy.model.vocab_size: too-small (name)"]


def saved(vocab: dict[str, object], **others: object) -> dict[str, object]:
    return {"model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}, **others}


def test_a_token_that_is_given_twice_needs_one_row(tmp_path):
    """Added tokens that the vocabulary has keep its ids; pieces of a Unigram model that repeat take a row each."""
    twice = {"id": 1, "content": "b", "special": True, "normalized": False}
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip"], False)
    write(tmp_path, saved({"a": 0, "b": 1}, added_tokens=[twice | flags]))
    assert problems_of(tmp_path, 2) == []
    assert problems_of(tmp_path, 1) == ["policy.model.vocab_size: too-small (name)"]
    pieces = [["a", 0.0], ["b", -1.0], ["b", -2.0], ["c", -3.0]]
    write(tmp_path, {"added_tokens": [], "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces}})
    assert problems_of(tmp_path, 4) == []
    assert problems_of(tmp_path, 3) == ["policy.model.vocab_size: too-small (name)"]


def test_ids_with_gaps_need_rows_up_to_the_highest(tmp_path):
    write(tmp_path, saved({"a": 0, "b": 50}))
    assert problems_of(tmp_path, 51) == []
    assert problems_of(tmp_path, 50) == ["policy.model.vocab_size: too-small (name)"]


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe{}",
        "",
        '{"model": {\n',
        [],
        {},
        saved({}, added_tokens=[3]),
        {"model": {}},
        saved({"a": "x"}),
        saved({"a": 0}, pre_tokenizer={"type": "Future"}),
        {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}},
        # The library panics at this prefix.
        {
            "added_tokens": [],
            "model": {"type": "BPE", "vocab": WORDS, "merges": ["a b"], "continuing_subword_prefix": "##"},
        },
    ],
)
def test_a_file_that_the_library_refuses_is_refused(tmp_path, content):
    write(tmp_path, content)
    assert problems_of(tmp_path, 32) == ["policy.tokenizer.name: not-readable"]


@pytest.mark.parametrize("content", ["{", []])
def test_settings_that_are_not_an_object_and_a_folder_in_place_of_a_file_are_too(tmp_path, content):
    write(tmp_path, content, "tokenizer_config.json")
    assert problems_of(tmp_path, 32) == ["policy.tokenizer.name: not-readable"]
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").mkdir()
    assert problems_of(tmp_path, 32) == ["policy.tokenizer.name: not-readable"]


@pytest.mark.parametrize("content", ["{", {}, None])
def test_special_tokens_are_those_of_the_file_and_none_where_it_cannot_be_read(tmp_path, content):
    tokenizer = Tokenizer(MODELS["BPE"])
    tokenizer.add_special_tokens(["<eos>", "b"])
    tokenizer.add_tokens(["plain"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if content is not None:
        write(tmp_path, content)
    assert special_tokens_of(str(tmp_path)) == ([] if content is not None else ["b", "<eos>"])


def test_a_folder_without_tokenizer_json_is_left_to_the_libraries(tmp_path):
    write(tmp_path, {"tokenizer_class": "LlamaTokenizer"}, "tokenizer_config.json")
    assert problems_of(tmp_path, 1) == []


@pytest.mark.parametrize(
    "named",
    [
        {"eos_token": "b"},
        {"eos_token": "<eos>", "pad_token": "<eos>", "bos_token": None, "add_bos_token": False},
        {"eos_token": {"__type": "AddedToken", "content": "<eos>", "special": True}, "pad_token": "<pad>"},
        {"additional_special_tokens": ["<x>", "a"], "extra_special_tokens": {"image": "<y>"}},
        {"added_tokens_decoder": {"3": {"content": "<x>", "special": True}}},
    ],
)
def test_tokens_that_only_the_settings_name_are_counted_as_the_library_counts_them(tmp_path, named):
    Tokenizer(MODELS["BPE"]).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, named | {"tokenizer_class": "PreTrainedTokenizerFast"}, "tokenizer_config.json")
    rows = len(AutoTokenizer.from_pretrained(tmp_path, local_files_only=True))
    assert problems_of(tmp_path, rows) == []
    assert problems_of(tmp_path, rows - 1) == ["policy.model.vocab_size: too-small (name)"]


def test_the_preflight_compares_with_the_model_of_the_recipe(load, tmp_path):
    write(tmp_path, saved({"a": 0, "b": 32}))
    with wrong_key("policy.model.vocab_size: too-small (name)", 32, 33):
        preflight(load(f"policy.tokenizer.name={tmp_path}"))
    assert preflight(load(f"policy.tokenizer.name={tmp_path}", "policy.model.vocab_size=33"))


def with_chat(folder, template, *overrides):
    """A recipe whose tokenizer shows conversations; <pad>, <end> and <turn> are its first ids."""
    rows = folder / "rows.jsonl"
    rows.write_text('{"input": "2+2?", "output": "4"}\n' * 64)
    return load_config(
        EXEMPLAR,
        [
            f"policy.tokenizer.name={save_chat_tokenizer(folder / 'tokenizer', template)}",
            f"policy.model.vocab_size={VOCABULARY}",
            "policy.model.max_position_embeddings=128",
            "policy.max_total_sequence_length=128",
            f"data={{dataset_name: jsonl, apply_chat_template: true, train: {{data_path: {rows}}}}}",
            *("grpo.val_period=0", "grpo.val_at_end=false"),
            *overrides,
        ],
    )


def test_the_ends_of_answers_are_told_with_their_texts(tmp_path):
    assert ends_of(load_config(EXEMPLAR).policy) == {15: "$"}
    config = with_chat(tmp_path, TEMPLATE, "policy.generation.stop_token_ids=[2, 3]")
    (tmp_path / "tokenizer/generation_config.json").write_text('{"eos_token_id": [1, 0]}')
    assert ends_of(config.policy) == {1: "<end>", 0: "<pad>", 2: "<turn>", 3: " "}
    subject = {one.name: one.found for one in subject_of(preflight(config))}
    assert subject["answers end with"] == "'<end>' (1), '<pad>' (0), '<turn>' (2), ' ' (3)"


@pytest.mark.parametrize(
    ("end", "overrides", "warns"),
    [
        ("<end>", [], False),
        ("<turn>", [], True),
        ("<turn>", ["policy.generation.stop_token_ids=[2]"], False),
        ("<turn>", ["data.apply_chat_template=false"], False),
        ("no token", [], True),
        ("\n", [], False),
        ("{{ no_function_of_transformers() }}", [], False),
    ],
)
def test_a_template_whose_turns_end_with_none_of_the_ends_is_told(tmp_path, end, overrides, warns):
    config = with_chat(tmp_path, TEMPLATE.replace("<end>", end), *overrides)
    told = ["data.apply_chat_template: contradicts (stop_token_ids)"] if warns else []
    assert briefs(turn_problems(config)) == briefs(preflight(config).warnings) == told


READS = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% if m.stop %}{% break %}{% endif %}"
READS += (
    "{% endfor %}{% set deep = deep if deep is defined else 1 %}{{ '<think>' if enable_thinking and deep }}"
)


@pytest.mark.parametrize("place", ["recipe", "file", "settings", "named", "nowhere"])
def test_variables_that_the_chat_template_does_not_read_are_told(tmp_path, place):
    settings = {"settings": READS, "named": [{"name": "default", "template": READS}]}
    tokenizer = byte_tokenizer(tmp_path / "tokenizer", None)
    folder = tmp_path / "tokenizer"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if place == "file":
        write(folder, READS, "chat_template.jinja")
    own = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, own | {"chat_template": settings.get(place, "{{ messages")}, "tokenizer_config.json")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input": "1", "output": "1"}\n' * 64)
    source = f"{{data_path: {rows}, split_validation_size: 0}}"
    given = [
        f"policy.tokenizer.name={folder}",
        f"policy.model.vocab_size={tokenizer.vocab_size}",
        "+policy.tokenizer.chat_template_kwargs={enable_thinkng: false, enable_thinking: false, deep: 2, x: 1}",
        f"data={{dataset_name: files, apply_chat_template: true, train: {source}, special_tokens_in_content: text}}",
        "grpo.num_prompts_per_step=16",
        "grpo.val_period=0",
        "grpo.val_at_end=false",
    ]
    if place == "recipe":
        given.append(f"+policy.tokenizer.chat_template={json.dumps(READS)}")
    found = preflight(load_config(EXEMPLAR, given)).warnings
    told = {problem.path.rpartition(".")[2]: problem.remedy for problem in found}
    if place == "nowhere":
        assert told == {}, "a template that is no Jinja is told by what shows a row"
    else:
        assert told.keys() == {"enable_thinkng", "x"}
        assert "enable_thinking" in told["enable_thinkng"]
