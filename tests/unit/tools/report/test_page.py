import json
import math
import random
import re
from pathlib import Path

import pytest
from run_folder import HOSTILE, rows, write_events, write_run

from nemo_rl_mcore import cli
from nemo_rl_mcore.tools.report import page, read_run
from nemo_rl_mcore.tools.report.page import differences, faults, findings_of, summary
from nemo_rl_mcore.tools.report.run_data import RunData


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


# What to look at


def found(metrics, tmp_path, **known):
    numbered = [{"step": float(step), **row} for step, row in enumerate(metrics, 1)]
    return findings_of(RunData(tmp_path, numbered, **known))


LATE = {"steps": lambda value, before=1.0: lambda step: before if step <= 20 else value}["steps"]
NO_FINDING = {
    "healthy": {
        **{"train/entropy": lambda step: 3 - step / 50, "train/kl_penalty": 0.01, "train/grad_norm": 1.0},
        **{
            "train/token_mult_prob_error": 1.002,
            "train/truncation_rate": 0.05,
            "train/probs_ratio_clipfrac": 0.1,
        },
        **{
            "async/ess": 0.97,
            "async/trainer_idle": 0.1,
            "async/engine_idle": 0.2,
            "train/skipped_steps": 0.0,
        },
        **{"train/reward_min": 0.0, "train/reward_max": 1.0},
    },
    "a task that is learnt leaves nothing to explore": {
        **{"train/entropy": LATE(0.05, 3.0), "train/reward": LATE(1.0, 0.1)},
        **{"train/reward_min": LATE(1.0, 0.0), "train/reward_max": 1.0},
    },
    "a cost that has become nothing is learnt": {
        **{"train/entropy": LATE(0.05, 3.0), "train/reward": LATE(-0.02, -0.9)},
        **{"train/reward_min": -1.0, "train/reward_max": 0.0},
    },
    "a reward that is not finite has not fallen": {
        "train/reward": lambda step: math.nan if step == 1 else step / 40
    },
}


@pytest.mark.parametrize("columns", NO_FINDING.values(), ids=NO_FINDING)
def test_what_is_as_it_should_be_gives_no_finding(tmp_path, columns):
    assert found(rows(40, **columns), tmp_path) == []


@pytest.mark.parametrize(
    ("columns", "words", "panel"),
    [
        ({"train/entropy": LATE(0.05, 3.0)}, "Entropy has collapsed, from 3 to 0.05", "train/entropy"),
        (
            {"train/token_mult_prob_error": LATE(1.2)},
            "by a factor of up to 1.2 per token",
            "train/token_mult_prob_error",
        ),
        ({"train/reward": LATE(0.1, 0.9)}, "was 0.9 at step 10 and is 0.1 now", "train/reward"),
        ({"validation/reward": LATE(0.1, 0.9)}, "was 0.9 at step 1 and is 0.1 now", "validation/reward"),
        ({"train/truncation_rate": LATE(0.6)}, "60% of the answers", "train/truncation_rate"),
        ({"train/loss": lambda step: math.nan if step == 7 else 1.0}, "not finite in step 7:", "train/loss"),
        ({"train/skipped_steps": 3.0}, "3 steps had no update", "train/grad_norm"),
        (
            {"train/reward_min": 0.0, "train/reward_max": 0.0},
            "last 40 steps have the same reward, 0",
            "train/reward_std",
        ),
        ({"async/ess": LATE(0.3)}, "effective sample of only 30%", "async/ess"),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" in value else "",
)
def test_each_rule_tells_of_its_case(tmp_path, columns, words, panel):
    findings = found(rows(40, **columns), tmp_path)
    assert [finding.panel for finding in findings] == [panel]
    assert words in findings[0].text


def test_noise_is_no_fall(tmp_path):
    """Of a reward that stays where it is, its best is always above its last."""
    noise = random.Random(1)
    for _ in range(20):
        assert found(rows(60, **{"train/reward": lambda _: noise.gauss(0.5, 0.05)}), tmp_path) == []
        assert found(rows(60, **{"validation/reward": lambda _: noise.gauss(0.5, 0.01)}), tmp_path) == []


def test_answers_of_older_weights_are_no_mismatch(tmp_path):
    columns = {"train/token_mult_prob_error": 1.2, "async/age_max": LATE(1.0, 0.0)}
    [finding] = found(rows(40, **columns), tmp_path)
    assert "in 20 of 20 steps" in finding.text
    assert found(rows(40, **columns | {"async/age_max": 1.0}), tmp_path) == []


def test_a_run_that_has_not_all_its_steps_is_told(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    recipe = {"grpo": {"max_num_steps": 40}}
    for steps in (0, 19):
        [finding] = found(rows(steps), tmp_path, recipe=recipe)
        assert finding.text.startswith(f"The run has {steps} of 40 steps")
    assert found(rows(40), tmp_path, recipe=recipe) == []
    assert found(rows(2), tmp_path, recipe={"sft": {"max_num_steps": "many"}}) == []


@pytest.mark.parametrize("count", [0, 1, 2])
def test_hardly_any_steps_are_no_trouble(tmp_path, count):
    columns = {
        "train/entropy": 1.0,
        "train/grad_norm": math.nan,
        "async/ess": math.nan,
        "validation/reward": 0.5,
    }
    assert len(found(rows(count, **columns), tmp_path)) == (count > 0)
