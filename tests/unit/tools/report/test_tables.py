import math

import pytest
from run_folder import rows, write_events, write_results, write_run

from nemo_rl_mcore.tools.report import read_run
from nemo_rl_mcore.tools.report.tables import differences, evaluations, faults, summary


def test_the_summary_tells_what_the_run_came_to(tmp_path):
    columns = {"train/total_num_tokens": 1000.0, "validation/loss": lambda step: abs(step - 20.0)}
    lines = dict(summary(read_run(write_run(tmp_path, rows(40, **columns), steps=50))))
    assert lines["steps"] == "40 of 50"
    assert lines["time in steps"] == "0:00:40"
    assert lines["tokens"] == "40,000"
    assert lines["train/reward"] == "0.1375 at first, 0.8875 at last"
    assert lines["validation/loss"] == "19 at first, best 0 at step 20, 20 at last"


def test_what_is_not_finite_is_not_added_up(tmp_path):
    columns = dict.fromkeys(
        ("timing/total", "train/total_num_tokens"), lambda step: math.nan if step == 2 else 1.0
    )
    lines = dict(summary(read_run(write_run(tmp_path, rows(4, **columns)))))
    assert (lines["time in steps"], lines["tokens"]) == ("0:00:03", "3")


def test_evaluations_have_their_standard_errors(tmp_path):
    write_results(tmp_path / "eval")
    write_results(tmp_path, 0.25)
    outer, inner = evaluations(read_run(tmp_path))
    assert outer["header"] == ["set", "prompts", "samples", "accuracy", "pass@4"]
    assert outer["rows"] == [["digits", "4", "8", "0.25 ± 0.1", "1"]]
    assert (inner["title"], inner["rows"][0][3]) == ("eval", "0.5 ± 0.1")


def test_faults_are_those_of_the_metrics_and_of_the_log(tmp_path):
    restarts = {"recovery/restarts": lambda step: float(step >= 2) + (step >= 4)}
    write_run(tmp_path, rows(5, **restarts))
    write_events(tmp_path)
    assert faults(read_run(tmp_path)) == [
        ["step 2", "1 times the run went back to a checkpoint with new ranks"],
        ["step 4", "1 times the run went back to a checkpoint with new ranks"],
        ["step 2", "ranks died while the optimizer stepped; the step was done again: rank 1 died"],
        ["step 1", "the driver started again and went on from here"],
        ["all steps", "1 prompts were asked again after a failure: timeout"],
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
