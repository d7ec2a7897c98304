"""The answers of a run on disk: whole up to the last finished step when it is killed, and kept by whatever follows."""

import os
import signal
from pathlib import Path

import pytest

from nemo_rl_mcore.driver.observability import read_rollouts

pytestmark = pytest.mark.stage("exhaustive")

ONE_RANK = "cluster.cpu_workers_per_node=1"


def steps_in(folder: Path) -> list[int]:
    return sorted(
        int(path.name.split(".")[0].removeprefix("step_")) for path in folder.glob("step_*.jsonl.gz")
    )


def test_kill_9_keeps_metrics_and_answers_of_every_finished_step_and_a_resume_overwrites_none(start) -> None:
    section = ("checkpointing.enabled=true", "checkpointing.save_period=5", "grpo.max_num_steps=100000")
    run = start("run", ONE_RANK, *section)
    run.wait_for_step(19)
    os.kill(run.process.pid, signal.SIGKILL)
    run.watch.kill_all()
    rows = run.steps()
    last = len(rows)
    assert last >= 19
    folder = run.log_dir / "rollouts"
    # A step whose row was not written any more may have its answers.
    assert steps_in(folder)[:last] == [*range(1, last + 1)]
    for step in (1, last):
        answers = list(read_rollouts(folder / f"step_{step}.jsonl.gz"))
        assert len(answers) == 256
        mean = sum(answer["reward"] for answer in answers) / 256
        assert mean == pytest.approx(rows[step - 1]["train/reward"], abs=1e-6)
        assert {answer["weight_version_max"] for answer in answers} == {step - 1}
    written = {path.name: path.read_bytes() for path in folder.iterdir()}

    saved = last - last % 5
    resumed = start("run", ONE_RANK, *section[:2], f"grpo.max_num_steps={saved + 1}", "grpo.val_at_end=true")
    output = resumed.finish(within_s=120)
    assert "restoring the checkpoint" in output
    assert resumed.steps()[-1].keys() >= {
        "timing/startup/ray",
        "timing/startup/policy",
        "timing/startup/restore",
    }
    assert steps_in(folder) == [*range(1, saved + 2)]
    assert steps_in(folder / "validation") == [saved + 1]
    aside = run.log_dir / "rollouts.1"
    for name, content in written.items():
        kept = folder / name if int(name.split(".")[0].removeprefix("step_")) <= saved else aside / name
        assert kept.read_bytes() == content, name
    if (again := f"step_{saved + 1}.jsonl.gz") in written:
        # What was answered once more is what was answered before.
        assert list(read_rollouts(folder / again)) == list(read_rollouts(aside / again))
