import json
import math
import re
from pathlib import Path

import pytest
from run_folder import HOSTILE, rows, write_events, write_run

from nemo_rl_mcore import cli
from nemo_rl_mcore.tools.report import page, read_run
from nemo_rl_mcore.tools.report.page import differences, faults, summary


def content(page):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    )


def test_the_page_stands_in_the_folder_and_is_told(tmp_path, capsys):
    write_run(tmp_path, rows(3), prompt=HOSTILE, response=HOSTILE)
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    text = (tmp_path / "report.html").read_text("utf-8")
    assert content(text)["runs"][0]["steps"][0]["answers"][0]["prompt"] == HOSTILE
    before, _, after = text.partition('id="data">')
    assert "<img src=x" not in text
    assert before.count("<title>") == 1
    assert after.rstrip().endswith("</html>")


def test_several_runs_have_a_page_here(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "other"):
        write_run(tmp_path / name, rows(3), steps=len(name))
    assert cli.main(["report", "one", "other", "one"]) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    found = content((tmp_path / "comparison.html").read_text("utf-8"))
    assert [run["name"] for run in found["runs"]] == ["one", "other"]
    assert found["differences"] == [["grpo.max_num_steps", "3", "5"]]


def test_folders_of_one_name_are_told_apart_and_one_folder_is_one_run(tmp_path, monkeypatch):
    for name in ("one", "other"):
        write_run(tmp_path / name / "run", rows(3))
    (tmp_path / "link").symlink_to("one")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "one/run", "other/run", "other/run/", "link/../other/run"]) == 0
    found = content((tmp_path / "comparison.html").read_text("utf-8"))
    assert [run["name"] for run in found["runs"]] == ["one/run", "other/run"]
    monkeypatch.chdir("one/run")
    assert cli.main(["report", "."]) == 0
    assert "<title>run</title>" in (tmp_path / "one/run/report.html").read_text("utf-8")


def test_mistakes_are_told_and_leave_nothing(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path} " in capsys.readouterr().err
    write_run(tmp_path / "run", rows(1))
    assert cli.main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "no/page.html")]) == 2
    assert "no/page.html" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["report"])


def test_a_page_that_cannot_be_made_or_written_does_not_fail_a_run_that_is_done(
    tmp_path, monkeypatch, capsys
):
    write_run(tmp_path, rows(1))
    (tmp_path / "report.html").mkdir()
    page.page_of_run(tmp_path)
    assert ": IsADirectoryError" in capsys.readouterr().err
    monkeypatch.setattr(page, "read_run", lambda folder: {}["gone"])
    page.page_of_run(tmp_path)
    assert ": KeyError: 'gone'" in capsys.readouterr().err


def test_a_link_at_the_temporary_name_of_the_page_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/reward": 0.5}\n')
    (tmp_path / "report.html.tmp").symlink_to(tmp_path / "victim")
    assert page.run_report([str(tmp_path)], None) == 0
    assert (tmp_path / "victim").read_text() == "precious"


def test_numbers_whose_sum_is_too_large_end_no_report(tmp_path: Path) -> None:
    rows = [{"step": step, "train/reward": 1e308, "train/loss": -1e308} for step in range(1, 31)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert page.run_report([str(tmp_path)], None) == 0


def test_the_summary_tells_what_the_run_came_to(tmp_path):
    columns = {"train/total_num_tokens": 1000.0, "validation/loss": lambda step: abs(step - 20.0)}
    lines = dict(summary(read_run(write_run(tmp_path, rows(40, **columns), steps=50))))
    assert lines["steps"] == "40 of 50"
    assert lines["time in steps"] == "0:00:40"
    assert lines["tokens"] == "40,000"
    assert lines["train/reward"] == "0.1375 at first, 0.8875 at the end"
    assert lines["validation/loss"] == "19 at first, best 0 at step 20, 20 at the end"


def test_what_is_not_finite_is_not_added_up(tmp_path):
    columns = dict.fromkeys(
        ("timing/total", "train/total_num_tokens"), lambda step: math.nan if step == 2 else 1.0
    )
    lines = dict(summary(read_run(write_run(tmp_path, rows(4, **columns)))))
    assert (lines["time in steps"], lines["tokens"]) == ("0:00:03", "3")


def test_faults_are_those_of_the_metrics_and_of_the_log(tmp_path):
    restarts = {"recovery/restarts": lambda step: float(step >= 2) + (step >= 4)}
    write_run(tmp_path, rows(5, **restarts))
    write_events(tmp_path)
    assert faults(read_run(tmp_path)) == [
        ["step 2", "1 restarts from a checkpoint with new ranks"],
        ["step 4", "1 restarts from a checkpoint with new ranks"],
        ["step 2", "ranks died during the optimizer step; the step was repeated: rank 1 died"],
        ["step 1", "the driver restarted and continued from here"],
        ["all steps", "1 prompts were repeated after a failure: timeout"],
    ]


@pytest.mark.parametrize("known", [True, False])
def test_recipes_are_compared_key_by_key(tmp_path, known):
    runs = [write_run(tmp_path / str(steps), rows(1), steps=steps) for steps in (5, 6)]
    if not known:
        (runs[1] / "config.yaml").unlink()
    found = differences([read_run(folder) for folder in runs])
    assert found == (
        [["grpo.max_num_steps", "5", "6"]] if known else [["seed", "1", ""], ["grpo.max_num_steps", "5", ""]]
    )
