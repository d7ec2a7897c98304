import json

import pytest
from test_suites.check_metrics import parse_check, read_metrics
from test_suites.dump_metrics import METRICS_FILE, main

from nemo_rl_mcore.driver.observability import sinks

pytestmark = pytest.mark.stage("docs")


@pytest.fixture
def dump(tmp_path):
    """Write rows to metrics.jsonl, run the command, and give its status and the file it wrote."""

    def call(text):
        (tmp_path / METRICS_FILE).write_text(text, "utf-8")
        output = tmp_path / "metrics.json"
        return main(str(tmp_path), str(output)), output

    return call


def rows(*steps):
    return "".join(json.dumps({"step": step, "train/loss": step / 2}) + "\n" for step in steps)


def test_what_the_logger_writes_can_be_checked(tmp_path):
    sink = sinks.JsonlSink(tmp_path)
    sink.log(0, {"validation/accuracy": 0.25})
    sink.log(1, {"train/loss": 2.0})
    sink.log(2, {"train/loss": float("nan"), "validation/accuracy": 0.5})
    sink.close()
    output = tmp_path / "metrics.json"
    assert METRICS_FILE == sinks.METRICS_FILE
    assert main(str(tmp_path), str(output)) == 0
    assert json.loads(output.read_text()) == {
        "validation/accuracy": {"0": 0.25, "2": 0.5},
        "train/loss": {"1": 2.0, "2": None},
    }
    metrics = read_metrics(output, 2)
    assert parse_check('data["validation/accuracy"]["2"] == 0.5').evaluate(metrics)[0]
    with pytest.raises(ValueError, match="train/loss at step 2 is null"):
        parse_check('max(data["train/loss"]) > 0').evaluate(metrics)


@pytest.mark.parametrize("steps", [(1, 2, 3), (0, 1, 2)])
def test_rows_that_are_whole(dump, steps):
    status, output = dump(rows(*steps))
    assert status == 0
    assert json.loads(output.read_text()) == {"train/loss": {str(step): step / 2 for step in steps}}


def test_runs_before_have_the_name_of_their_folder_before_their_metrics(dump, tmp_path):
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / METRICS_FILE).write_text(rows(1, 2, 3))
    status, output = dump(rows(1))
    assert status == 0
    assert json.loads(output.read_text()).keys() == {"train/loss", "teacher/train/loss"}
    metrics = read_metrics(output, 1)
    assert parse_check('data["teacher/train/loss"]["3"] > data["train/loss"]["1"]').evaluate(metrics)[0]


def test_a_run_before_that_is_not_whole_is_refused(dump, tmp_path, capsys):
    (tmp_path / "warm_start").mkdir()
    assert dump(rows(1))[0] == 1
    assert "warm_start/metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (rows(1, 3), "step 3 stands where step 2 should"),
        (rows(1, 2, 2), "step 2 stands where step 3 should"),
        (rows(2, 1), "step 2 stands where step 1 should"),
        (rows(0, 0), "step 0 stands where step 1 should"),
        ("[1]\n", "indices must be integers"),
        (rows(1, 2)[:-1], "cut off"),
        ("", "is empty"),
        ('{"train/loss": 1}\n', "step"),
        ("{\n", "Expecting"),
    ],
)
def test_rows_that_are_not_whole_are_refused(dump, capsys, text, message):
    status, output = dump(text)
    assert status == 1
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_a_missing_file_is_refused(tmp_path, capsys):
    assert main(str(tmp_path), str(tmp_path / "metrics.json")) == 1
    assert "No such file" in capsys.readouterr().err
