import codecs
import json
import logging
import os
import subprocess
import sys

import datasets
import pytest
from library_files import write_parquet
from refusals import assert_holds, brief
from rows_of_files import prompts, write_rows

from nemo_rl_mcore.config.base import ConfigError, join_path
from nemo_rl_mcore.config.data import DataConfig, RowKind
from nemo_rl_mcore.config.source import SourceConfig, each
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.examples import read_examples
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.rows import is_fetched, read_rows
from nemo_rl_mcore.data.strict_json import parse_json, read_regular
from nemo_rl_mcore.errors import shortened

ROWS = [{"input": f"question {number}", "output": str(number)} for number in range(10)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the tests' data lie, and the command is started."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "rows.csv").write_text(
        "input,output\n" + "".join(f"{r['input']},{r['output']}\n" for r in ROWS)
    )
    write_parquet(tmp_path / "rows.parquet", ROWS)
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data/train-0.parquet", ROWS)
    write_parquet(tmp_path / "data/test-0.parquet", ROWS[:2])
    parts = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:2])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved_alone")
    return tmp_path


def answers(**keys):
    rows = read_rows(SourceConfig.model_validate(keys))
    return [int(row.values["output"]) for row in rows]


@pytest.mark.parametrize(
    "path", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "data", "saved", "saved_alone"]
)
def test_all_formats_hold_the_same_rows(folder, path):
    assert answers(data_path=path) == list(range(10))
    assert answers(data_path=path, split="train[20%:50%]") == [2, 3, 4]
    assert answers(data_path=path, split="train[-1:]+train[:2]") == [9, 0, 1]


@pytest.mark.parametrize("path", ["data", "saved"])
def test_another_split(folder, path):
    assert answers(data_path=path, split="test") == [0, 1]


def test_several_files_and_patterns(folder):
    assert answers(data_path=["rows.csv", "rows.jsonl"]) == [*range(10), *range(10)]
    assert answers(data_path="rows.j*") == [*range(10), *range(10)]


@pytest.mark.parametrize(
    ("keys", "key", "told"),
    [
        ({"data_path": "rows.jsonl", "split": "test"}, "split", "'test'"),
        ({"data_path": "rows.jsonl", "split": "train[:x]"}, "split", "'train[:x]'"),
        ({"data_path": "data", "split": "dev"}, "split", "\"dev\". Should be one of ['train', 'te"),
        ({"data_path": "saved", "split": "dev"}, "split", "'dev'"),
        ({"data_path": "data", "subset": "main"}, "subset", "'main' not found. Available: ['def"),
        ({"data_path": "rows.csv", "subset": "main"}, "subset", "'main'"),
        ({"data_path": "gone/*.csv"}, "data_path", "'gone/*.csv'"),
        ({"data_path": "gone.parquet"}, "data_path", "'gone.parquet'"),
        ({"data_path": ["data", "rows.csv"]}, "data_path", "'data'"),
        ({"data_path": "bad.parquet"}, "data_path", "(ArrowInvalid: "),
        ({"data_path": "bad.csv"}, "data_path", "(EmptyDataError: "),
        ({"data_path": "bad.json"}, "data_path", "'bad.json'"),
    ],
)
def test_sources_that_cannot_be_read(folder, keys, key, told):
    for name, text in (("bad.parquet", "x"), ("bad.csv", ""), ("bad.json", "[1,")):
        (folder / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_rows(SourceConfig.model_validate(keys))
    assert caught.value.problems[0].path == key
    assert told in str(caught.value)


def test_a_data_set_of_the_hub_that_cannot_be_reached(folder, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    source = SourceConfig(dataset_name="gsm8k")
    assert is_fetched(*source.paths)
    assert not is_fetched("data/gone.parquet")
    with pytest.raises(ConfigError, match=r"^data_path: 'openai/gsm8k' "):
        read_rows(source)


@pytest.mark.parametrize("path", ["rows.parquet", "data"])
def test_a_column_that_is_not_there_is_told_once(folder, path):
    source = SourceConfig(data_path=path, input_key="a.b")
    _, [problem] = read_examples({"data.train.1": source}, {}, RowKind.PROMPTS, chat=False)
    assert brief(problem) == "data.train.1.input_key: wrong-row"
    assert_holds(str(problem), "'a.b'", "'input'", "'output'")


def test_a_bad_row_is_named_by_its_number(folder):
    write_parquet(folder / "bad.parquet", [*ROWS, {"input": None, "output": "1"}])
    source = {"data.train": SourceConfig(data_path="bad.parquet")}
    _, [problem] = read_examples(source, {}, RowKind.PROMPTS, chat=False)
    assert brief(problem) == "data.train.data_path: wrong-row"
    assert_holds(str(problem), "bad.parquet", 11, "input")


def test_cells_of_csv_are_text_as_it_is_written(folder):
    (folder / "cells.csv").write_text(
        ",input,output\n0,None,007\n1,NA,72\n2,true,1.5\n3,False,\n4,1e400,True\n"
    )
    rows = [row.values for row in read_rows(SourceConfig(data_path="cells.csv"))]
    assert [(row["input"], row["output"]) for row in rows] == [
        ("None", "007"),
        ("NA", "72"),
        ("true", "1.5"),
        ("False", ""),
        ("1e400", "True"),
    ]


def test_a_null_is_no_conversation(folder):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [
        {"input": None, "output": None, "messages": turns},
        {"input": "c", "output": "d", "messages": None},
    ]
    write_parquet(folder / "mixed.parquet", rows)
    source = SourceConfig(data_path="mixed.parquet", split_validation_size=0)
    found, problems = read_examples({"data.train": source}, {}, RowKind.ANSWERS, chat=True)
    assert problems == []
    assert [example.answer for example in found.train] == ["b", "d"]


def test_an_answer_that_a_scored_row_does_not_state(folder):
    source = SourceConfig.model_validate(
        {"data_path": "rows.jsonl", "answer": {"after": "####"}, "split_validation_size": 0}
    )
    _, problems = read_examples({"data.train": source}, {}, RowKind.PROMPTS, chat=False)
    assert problems[0].path == "data.train.answer"
    assert_holds(problems[0].what, "rows.jsonl:1: ", "'0'", "'####'")
    assert len(problems) == 6
    assert read_examples({"data.train": source}, {}, RowKind.ANSWERS, chat=False)[1] == []


def test_own_formats_are_read_without_the_library(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert answers(data_path=["rows.jsonl", "rows.json"], split="train") == [*range(10), *range(10)]


@pytest.mark.parametrize("path", ["rows.jsonl", "rows.json", "rows.csv"])
def test_a_byte_order_mark_is_no_part_of_the_rows(folder, path):
    (folder / path).write_bytes(codecs.BOM_UTF8 + (folder / path).read_bytes())
    assert answers(data_path=path) == list(range(10))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("saved_alone/state.json", "_data_files", [{"filename": "../../etc/passwd"}]),
        ("saved/train/state.json", "_data_files", [{"filename": "/etc/passwd"}]),
        ("saved/dataset_dict.json", "splits", ["../saved_alone"]),
        ("saved_alone/state.json", "_data_files", "x"),
    ],
)
def test_a_saved_data_set_that_leads_out_of_its_folder_is_not_opened(folder, monkeypatch, name, key, value):
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**content, key: value}))
    monkeypatch.setattr(datasets, "load_from_disk", lambda *_: pytest.fail("opened"))
    with pytest.raises(ConfigError) as caught:
        answers(data_path=name.split("/")[0])
    assert caught.value.problems[0].path == "data_path"
    assert name in str(caught.value)


def test_the_library_writes_no_lines_next_to_ours(folder):
    (folder / "bad.parquet").write_text("x")
    datasets.logging.set_verbosity_warning()
    datasets.enable_progress_bars()
    written = logging.Handler()
    written.emit = lambda record: pytest.fail(record.getMessage())
    logging.getLogger("datasets").addHandler(written)
    try:
        with pytest.raises(ConfigError):
            answers(data_path="bad.parquet")
    finally:
        logging.getLogger("datasets").removeHandler(written)
    assert datasets.are_progress_bars_disabled()


@pytest.mark.stage("processes")
def test_a_file_above_the_memory_is_an_error_of_its_key(folder):
    with (folder / "huge.jsonl").open("wb") as file:
        file.truncate(1 << 36)  # sparse
    code = """
import resource
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.config.base import ConfigError
from nemo_rl_mcore.data.rows import read_rows
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
try:
    read_rows(SourceConfig(data_path="huge.jsonl"))
except ConfigError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("data_path: ")
    assert "huge.jsonl" in run.stdout


@pytest.mark.parametrize(
    "torn", [b'"\\ud83d"', b'"a \\uDC00"', b'"\xed\xa0\x80"', b'[{"role": "user", "content": "\\ud800"}]']
)
@pytest.mark.parametrize("name", ["torn.jsonl", "torn.json"])
def test_text_that_no_encoding_takes_names_its_row(folder, name, torn):
    whole = json.dumps(
        {"input": "\U0001f600 \\ud800", "output": "1"}
    ).encode()  # a whole pair, and a backslash
    lines = [whole, b'{"input": "x", "output": "2", "note": ' + torn + b"}", whole]
    is_list = name.endswith(".json")
    (folder / name).write_bytes(b"[" + b",".join(lines) + b"]" if is_list else b"\n".join(lines))
    source = SourceConfig.model_validate({"data_path": name, "split_validation_size": 0})
    examples, problems = read_examples({"data.train": source}, {}, RowKind.PROMPTS, chat=False)
    assert len(examples.train) == 2
    (problem,) = problems
    assert (problem.code, problem.path) == ("wrong-row", "data.train.data_path")
    assert_holds(problem.what, f"{name}, row 2" if is_list else f"{name}:2")


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
    ],
)
def test_a_bad_line_is_named(read, tmp_path, line, kind, message):
    good = {"input": "a", "output": "b", "prompt": "a", "chosen": "b", "rejected": "c"}
    _, problems = read([good, line], kind, chat=True)
    assert [problem.path for problem in problems] == ["train.data_path"]
    assert problems[0].what.startswith(f"{tmp_path / 'train.jsonl'}:2: ")
    assert message in problems[0].what


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_a_file_without_a_row(read, lines):
    assert "holds no row" in read(lines)[1][0].what


def test_a_share_is_held_out_by_the_prompt_alone(read):
    examples, _ = read(prompts(1000, "question {}"))
    assert len(examples.train) + len(examples.held_out) == 1000
    assert 70 < len(examples.held_out) < 130
    others, _ = read(
        [*reversed(prompts(1000, "question {}")), {"input": "question 3", "output": "another answer"}]
    )
    held_out = {example.text for example in examples.held_out}
    assert {example.text for example in others.held_out} == held_out
    half, _ = read(prompts(1000, "question {}"), split_validation_size=0.5)
    assert held_out < {example.text for example in half.held_out}
    assert {example.index for example in half.train}.isdisjoint(example.index for example in half.held_out)


def test_a_file_to_validate_with_leaves_all_rows_to_train_on(read):
    examples, _ = read(prompts(100, "question {}"), validation=prompts(7, "question {}"))
    assert (len(examples.train), len(examples.held_out)) == (100, 7)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is there twice"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": -Infinity}', "-Infinity is not a number"),
        ("[1e999]", "1e999 is too large"),
        ("", "Expecting value"),
        (b"\xe9", "can't decode"),
    ],
)
def test_what_json_loads_lets_pass_or_dies_of_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_json(text)


def test_messages_stay_short():
    key = "k" * 5_000_000
    with pytest.raises(ValueError, match="is there twice") as error:
        parse_json(f'{{"{key}": 1, "{key}": 2}}')
    assert len(str(error.value)) < 200
    assert shortened("a" * 60) == "a" * 60
    assert shortened("a" * 61) == "a" * 57 + "..."


def test_files_that_others_write_may_hold_infinity():
    assert parse_json("[Infinity, 1e999]", finite=False) == [float("inf")] * 2


def test_a_pipe_or_a_folder_is_no_file_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="no regular file"):
            read_regular(path)
