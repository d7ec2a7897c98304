import json

import pytest

from nemo_rl_mcore.config.base import join_path
from nemo_rl_mcore.config.data import DataConfig, RowKind
from nemo_rl_mcore.config.source import each
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.examples import read_examples
from nemo_rl_mcore.data.messages import Message

TALK = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


@pytest.fixture
def read(tmp_path):
    """Read lines as the file to train on, and perhaps others as the one to validate with."""

    def reader(lines, kind=RowKind.PROMPTS, validation=None, *, chat=False, **keys):
        given = {"train": {"data_path": write(tmp_path / "train.jsonl", lines), **keys}}
        if validation is not None:
            given["validation"] = {"data_path": write(tmp_path / "validation.jsonl", validation)}
        return read_data(given, kind, chat=chat)

    return reader


def read_data(given, kind=RowKind.PROMPTS, *, chat=False):
    data = DataConfig.model_validate({"dataset_name": "jsonl", **given})
    validation = {} if data.validation is None else {"validation": data.validation}
    train = {join_path("train", place): one for place, one in each(data.train).items()}
    return read_examples(train, validation, kind, chat=chat)


def write(path, lines):
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("\n".join(texts), "utf-8")
    return str(path)


def rows(count):
    return [{"input": f"question {number}", "output": number} for number in range(count)]


def test_prompts_and_answers(read, tmp_path):
    examples, problems = read(
        [{"input": "2+2=", "output": "4", "source": "x"}, "", {"input": "1/2=", "output": 0.5}],
        split_validation_size=0,
    )
    assert problems == []
    path = tmp_path / "train.jsonl"
    assert examples.train == [Prompt(0, "2+2=", "4"), Prompt(1, "1/2=", "0.5")]
    assert [row.place for row in examples.train] == [f"{path}:1", f"{path}:3"]
    assert examples.held_out == []


def test_keys_have_other_names_and_validation_takes_those_of_train(read):
    examples, problems = read(
        [{"q": "a", "r": "b"}], validation=[{"q": "c", "r": "d"}], input_key="q", output_key="r"
    )
    assert problems == []
    assert [(e.text, e.answer) for e in examples.train + examples.held_out] == [("a", "b"), ("c", "d")]


def test_a_conversation_is_a_context_with_its_last_answer(read):
    more = [*TALK, {"role": "user", "content": "+1?"}, {"role": "assistant", "content": "5"}]
    (example,) = read([{"messages": more}], RowKind.ANSWERS, chat=True, split_validation_size=0)[0].train
    turns = (Message("user", "2+2?"), Message("assistant", "4"), Message("user", "+1?"))
    assert (example.context, example.answer, example.imitate_all) == (turns, "5", True)


def test_a_prompt_may_be_a_conversation_where_a_template_shows_it(read):
    row = {"input": TALK[:1], "output": "4"}
    (example,) = read([row], chat=True, split_validation_size=0)[0].train
    assert (example.context, example.imitate_all) == ((Message("user", "2+2?"),), False)
    assert "needs data.apply_chat_template: true" in read([row])[1][0].what


def test_pairs(read):
    (example,) = read(
        [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}], RowKind.PAIRS, split_validation_size=0
    )[0].train
    assert (example.text, example.answer, example.rejected) == ("2+2=", "4", "5")


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ("{", RowKind.PROMPTS, "not JSON: "),
        ("[1]", RowKind.PROMPTS, "not an object but list"),
        ({"input": "a"}, RowKind.PROMPTS, "no key 'output'; it has 'input'"),
        ({}, RowKind.PROMPTS, "no key 'input'; it has none"),
        ({"input": 3, "output": "b"}, RowKind.PROMPTS, "input is 3, and must be text"),
        ({"input": "", "output": "b"}, RowKind.PROMPTS, 'input is "", and must be text'),
        ({"input": "a", "output": True}, RowKind.PROMPTS, "output is true, and must be text or a number"),
        ({"input": "a", "output": None}, RowKind.PROMPTS, "output is null"),
        ({"messages": TALK}, RowKind.PROMPTS, "no key 'input'"),
        ({"messages": TALK[:1]}, RowKind.ANSWERS, "messages does not end with an assistant's answer"),
        ({"messages": TALK[1:]}, RowKind.ANSWERS, "messages begins with an assistant's message"),
        ({"messages": []}, RowKind.ANSWERS, "messages is [], and must be a list of messages"),
        ({"messages": "hello"}, RowKind.ANSWERS, 'messages is "hello", and must be a list'),
        ({"messages": [{"role": "user"}]}, RowKind.ANSWERS, 'holds {"role": "user"}, which is not a message'),
        ({"messages": ["hi"]}, RowKind.ANSWERS, 'holds "hi", which is not a message'),
        ({"prompt": "a", "chosen": "b"}, RowKind.PAIRS, "no key 'rejected'"),
        ("[" * 100_000, RowKind.PROMPTS, "nested too deeply"),
        ('{"input": "a", "output": NaN}', RowKind.PROMPTS, "not JSON: NaN is not a number"),
        ('{"input": "a", "output": "b", "output": "c"}', RowKind.PROMPTS, "the key 'output' is there twice"),
    ],
)
def test_a_bad_line_is_named(read, tmp_path, line, kind, message):
    good = {"input": "a", "output": "b", "prompt": "a", "chosen": "b", "rejected": "c"}
    _, problems = read([good, line], kind, chat=True)
    assert [problem.path for problem in problems] == ["train.data_path"]
    assert problems[0].what.startswith(f"{tmp_path / 'train.jsonl'}:2: ")
    assert message in problems[0].what


def test_a_column_that_no_line_has_is_one_mistake(read, tmp_path):
    _, (problem,) = read(rows(8), input_key="question")
    assert problem.path == "train.input_key"
    assert problem.what == f"{tmp_path / 'train.jsonl'}:1: no key 'question'; it has 'input', 'output'"
    _, problems = read([{"output": 1}, {"output": 2}, *rows(1)])
    assert [problem.path for problem in problems] == ["train.data_path"] * 2


def test_bytes_that_are_no_text_are_a_bad_line(read, tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"input": "a", "output": "\xe9"}\n')
    _, problems = read_data({"train": {"data_path": str(tmp_path / "latin.jsonl")}})
    assert "latin.jsonl:1: not JSON" in problems[0].what


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_a_file_without_a_row(read, lines):
    assert "holds no row" in read(lines)[1][0].what


def test_files_that_are_not_there_are_both_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, problems = read_data(
        {"train": {"data_path": "gone.jsonl"}, "validation": {"data_path": "gone_too.jsonl"}}
    )
    assert [problem.path for problem in problems] == ["train.data_path", "validation.data_path"]
    assert "'gone.jsonl' cannot be read from" in problems[0].what


def test_a_share_is_held_out_by_the_prompt_alone(read):
    examples, _ = read(rows(1000))
    assert len(examples.train) + len(examples.held_out) == 1000
    assert 70 < len(examples.held_out) < 130
    others, _ = read([*reversed(rows(1000)), {"input": "question 3", "output": "another answer"}])
    held_out = {example.text for example in examples.held_out}
    assert {example.text for example in others.held_out} == held_out
    half, _ = read(rows(1000), split_validation_size=0.5)
    assert held_out < {example.text for example in half.held_out}
    assert {example.index for example in half.train}.isdisjoint(example.index for example in half.held_out)


def test_a_file_to_validate_with_leaves_all_rows_to_train_on(read):
    examples, _ = read(rows(100), validation=rows(7))
    assert (len(examples.train), len(examples.held_out)) == (100, 7)
