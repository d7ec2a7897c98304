"""Every built-in data set on a few rows of its schema, through each format and for each use of its rows."""

import csv
import json

import datasets
import pytest
import yaml
from library_files import write_parquet
from refusals import refused

from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.source import KNOWN, OTHER_NAMES, SourceConfig
from nemo_rl_mcore.data.examples import read_examples
from nemo_rl_mcore.data.rows import Row, RowError, RowReader

ROWS = yaml.safe_load(r"""
user: &user {role: user, content: 'What is 2+2?'}
four: &four {role: assistant, content: Four.}
five: &five {role: assistant, content: Five.}
gsm8k: {question: '48+24?', answer: "48 and 24 make 72.\n#### 72"}
math: {problem: 'Half?', level: '1', type: Algebra, solution: 'It is $\boxed{\frac{1}{2}}$.'}
math500: {problem: 'Half?', solution: 'So \boxed{0.5}.', answer: '\frac{1}{2}', unique_id: a}
dapo_math_17k: &dapo {prompt: [*user], reward_model: {ground_truth: '4', style: rule}, ability: MATH}
dapo_aime_2024: *dapo
openmathinstruct2:
  {problem: '2+2?', generated_solution: 'Four: \boxed{4}', expected_answer: '4', problem_source: math}
helpsteer3: {domain: general, context: [*user], response1: Five., response2: Four., overall_preference: 2}
tulu3_sft: {id: '1', messages: [*user, *four], source: x}
tulu3_preference: {prompt: 'What is 2+2?', chosen: [*user, *four], rejected: [*user, *five]}
aime_2024: {id: 60, problem: '2+2?', solution: Two and two., answer: '4', url: x, year: '2024'}
aime_2026: {problem_idx: 1, problem: '2+2?', answer: 4}
deepscaler: {problem: '2+2?', answer: '4', solution: Two and two.}
openr1_math_220k: {problem: '2+2?', solution: Two and two., answer: '4', source: x}
nemotron_cascade_2_sft_math: {messages: [*user, *four]}
""")
USER, _, _ = (ROWS.pop(name) for name in ("user", "four", "five"))


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Read one row as the rows of a data set, from a file of some format."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def reader(name, row, kind, written="jsonl", **keys):
        path = tmp_path / f"rows.{written}"
        if written == "parquet":
            write_parquet(path, [row])
        elif written == "csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, row)
                writer.writeheader()
                writer.writerow(row)
        else:
            path.write_text(json.dumps([row] if written == "json" else row))
        given = {"dataset_name": name, "data_path": str(path), **keys}
        source = SourceConfig.model_validate({**given, "split_validation_size": 0})
        examples, problems = read_examples({"data.train": source}, {}, kind, chat=True)
        assert problems == []
        return examples.train[0]

    return reader


def test_each_has_rows_here_and_a_place_on_the_hub():
    assert ROWS.keys() == KNOWN.keys() == set(OTHER_NAMES.values())
    assert all(str(keys["data_path"]).count("/") == 1 for keys in KNOWN.values())


@pytest.mark.parametrize("written", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("GSM8K", "72"),
        ("MATH", r"\frac{1}{2}"),
        ("MATH-500", r"\frac{1}{2}"),
        ("DAPOMath17K", "4"),
        ("DAPOMathAIME2024", "4"),
        ("AIME2024", "4"),
        ("AIME2026", "4"),
        ("DeepScaler", "4"),
        ("OpenR1-Math-220k", "4"),
        ("OpenMathInstruct-2", "4"),
        ("HelpSteer3", "Four."),
    ],
)
def test_what_is_scored_against(read, written, name, answer):
    assert read(name, ROWS[OTHER_NAMES[name]], RowKind.PROMPTS, written).answer == answer


@pytest.mark.parametrize("written", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(
    ("name", "keys", "imitated", "answer"),
    [
        ("gsm8k", {}, "48 and 24 make 72.\n#### 72", "72"),
        ("math", {}, r"It is $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        ("openmathinstruct2", {"output_key": "generated_solution"}, r"Four: \boxed{4}", "4"),
        ("helpsteer3", {}, None, "Four."),
        ("tulu3_sft", {}, None, "Four."),
        ("nemotron_cascade_2_sft_math", {}, None, "Four."),
    ],
)
def test_what_is_imitated_stays_whole(read, written, name, keys, imitated, answer):
    example = read(name, ROWS[name], RowKind.ANSWERS, written, **keys)
    assert (example.solution, example.answer) == (imitated, answer)


@pytest.mark.parametrize("written", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("name", ["helpsteer3", "tulu3_preference"])
def test_pairs(read, written, name):
    example = read(name, ROWS[name], RowKind.PAIRS, written)
    assert [turn.content for turn in example.context] == ["What is 2+2?"]
    assert (example.answer, example.rejected) == ("Four.", "Five.")


def test_columns_of_csv(read):
    example = read("gsm8k", ROWS["gsm8k"], RowKind.PROMPTS, "csv")
    assert (example.text, example.answer) == ("48+24?", "72")


def test_ranks_of_completions_say_which_is_better(read):
    answers = [{"rank": 1, "completion": [{"role": "assistant", "content": "Five."}]}]
    answers += [{"rank": 0, "completion": [{"role": "assistant", "content": "Four."}]}]
    row = {"context": [USER], "completions": answers}
    example = read("PreferenceDataset", row, RowKind.PAIRS, "parquet")
    assert (example.answer, example.rejected) == ("Four.", "Five.")


@pytest.mark.parametrize("ranks", [(None, 1), ("0", 1), (0,)])
def test_answers_without_ranks_are_named(ranks):
    row = {"context": [USER], "completions": [{"rank": rank, "completion": "Four."} for rank in ranks]}
    with refused("completions", by=RowError):
        RowReader(SourceConfig(data_path="a"), RowKind.PAIRS, chat=True).read(Row("a:1", row))


def test_a_pair_without_a_better_answer_is_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [ROWS["helpsteer3"] | {"overall_preference": number} for number in (-1, 0, 1)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = SourceConfig.model_validate({"data_path": str(path), "split_validation_size": 0})
    examples, problems = read_examples({"data.train": source}, {}, RowKind.PAIRS, chat=True)
    assert problems == []
    assert [example.answer for example in examples.train] == ["Five.", "Four."]


def test_a_row_of_nemo_gym_is_its_first_messages_and_all_of_it_is_kept():
    asked = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Add"}, {"type": "input_text", "text": " 2"}],
        },
        {"type": "function_call_output", "output": "5"},
    ]
    row = {
        "responses_create_params": {"input": asked, "tools": []},
        "agent_ref": {"name": "a"},
        "expected": 2,
    }
    reader = RowReader(SourceConfig(data_path="a"), RowKind.PROMPTS, chat=True)
    read = reader.read(Row("a:1", row))
    assert [(one.role, one.content) for one in read.context] == [("system", "Be brief."), ("user", "Add 2")]
    assert read.columns == row
    row["responses_create_params"]["input"] = []
    assert [one.role for one in reader.read(Row("a:2", row)).context] == ["user"]
    with pytest.raises(RowError):
        RowReader(SourceConfig(data_path="a"), RowKind.PROMPTS, chat=False).read(Row("a:1", row))
