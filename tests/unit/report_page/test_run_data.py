import pytest
from run_folder import rows, write_events, write_results, write_run

from nemo_rl_mcore.report_page import read_run


def test_a_folder_is_read_whole(tmp_path):
    write_run(tmp_path / "run", rows(3), steps=3)
    write_events(tmp_path / "run")
    write_results(tmp_path / "run/eval")
    run = read_run(tmp_path / "run")
    assert (run.name, run.algorithm, run.last_step, run.total_steps) == ("run", "grpo", 3, 3)
    assert len(run.events) == 4
    assert list(run.evaluations) == ["eval"]
    assert not run.unread


def test_what_cannot_be_read_is_told_and_the_rest_is_there(tmp_path):
    """A run that was killed cuts off its last row; a damaged file is named."""
    write_run(tmp_path, rows(3), steps=5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/rew')
    (tmp_path / "rollouts.jsonl").write_text("nothing\n")
    (tmp_path / "config.yaml").write_text("a: [")
    (tmp_path / "results.json").write_text("{")
    run = read_run(tmp_path)
    assert run.last_step == 3
    assert run.total_steps is None
    assert [
        name
        for name in ("rollouts.jsonl", "config.yaml", "{")
        if not any(name in line for line in run.unread)
    ] == ["{"]
    assert len(run.unread) == 3


def test_a_folder_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds neither metrics.jsonl nor results.json"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="holds neither"):
        read_run(tmp_path / "absent")


def test_the_folder_of_an_evaluation_alone_is_read(tmp_path):
    write_results(tmp_path)
    run = read_run(tmp_path)
    assert list(run.evaluations) == ["."]
    assert run.last_step == 0
