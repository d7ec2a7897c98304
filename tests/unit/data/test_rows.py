import codecs
import json
import logging
import subprocess
import sys

import datasets
import pytest
from library_files import write_parquet
from refusals import assert_holds

from nemo_rl_mcore.config.base import ConfigError
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.data.examples import read_examples
from nemo_rl_mcore.data.rows import is_fetched, read_rows

ROWS = [{"input": f"question {number}", "output": str(number)} for number in range(10)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the tests' data lie, and the command is started."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
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
    _, problems = read_examples({"data.train.1": source}, {}, RowKind.PROMPTS, chat=False)
    assert [str(problem) for problem in problems] == [
        "data.train.1.input_key: no key 'a.b'; it has 'input', 'output'; name one of those"
    ]


def test_a_bad_row_is_named_by_its_number(folder):
    write_parquet(folder / "bad.parquet", [*ROWS, {"input": None, "output": "1"}])
    _, problems = read_examples(
        {"data.train": SourceConfig(data_path="bad.parquet")}, {}, RowKind.PROMPTS, chat=False
    )
    assert [str(problem) for problem in problems] == [
        "data.train.data_path: bad.parquet, row 11: input is null, and must be text"
    ]


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
