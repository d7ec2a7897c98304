"""A run that is killed and started again is the run that nobody killed, bit for bit; and what it answered is kept."""

import os
import signal
from pathlib import Path

import pytest
from grpo_run import Run, assert_same_tensors, numbers

from nemo_rl_mcore.driver.observability import read_rollouts
from nemo_rl_mcore.recipe.load import load_config

STEPS = 5
OVERRIDES = (
    *(f"grpo.max_num_steps={STEPS}", "grpo.val_period=1", "grpo.max_val_samples=16"),
    *("loss_fn.reference_policy_kl_penalty=0.05", "policy.train_global_batch_size=128"),
    "policy.train_micro_batch_size=32",
    *("checkpointing.enabled=true", "checkpointing.save_period=2", "checkpointing.keep_top_k=1"),
    "checkpointing.metric_name=val:reward",
)


@pytest.mark.stage("distributed")
@pytest.mark.parametrize(
    ("ranks", "killed_in"),
    [
        (1, 4),
        pytest.param(1, 2, marks=pytest.mark.exhaustive),  # before the first checkpoint
        pytest.param(1, STEPS, marks=pytest.mark.nightly),
        pytest.param(2, 4, marks=pytest.mark.nightly),
    ],
)
def test_a_killed_run_resumes_as_if_nothing_had_happened(start, ranks, killed_in):
    cluster = f"cluster.cpu_workers_per_node={ranks}"
    undisturbed = start("undisturbed", *OVERRIDES, cluster)
    assert undisturbed.end(within_s=300)[0] == 0
    killed = start("killed", *OVERRIDES, cluster)
    killed.wait_for_step(killed_in - 1, within_s=240)
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.watch.kill_all()
    resumed = start("killed", *OVERRIDES, cluster)
    output = resumed.finish()
    if killed_in > 3:
        assert "resuming" in output
    assert numbers(resumed) == numbers(undisturbed)
    assert [row["step"] for row in numbers(resumed)] == [1, 2, 3, 4, 5]
    wanted, found = undisturbed.checkpoint(STEPS), resumed.checkpoint(STEPS)
    assert {name.split()[0] for name in wanted} == {"weights", "reference", "optimizer"}
    assert_same_tensors(wanted, found)
    kept = [sorted(os.listdir(run.log_dir / "checkpoints")) for run in (undisturbed, resumed)]
    assert kept[0] == kept[1]


@pytest.mark.exhaustive
def test_a_migrated_run_is_resumed_by_the_same_command(tmp_path):
    theirs = Path(__file__).parents[1] / "fixtures/over_nemo_rl.yaml"
    saves = ("checkpointing.enabled=true", "checkpointing.save_period=1", "checkpointing.metric_name=null")
    command = ("--migrate", *saves, f"checkpointing.checkpoint_dir={tmp_path / 'checkpoints'}")
    for steps in (1, 2):
        run = Run(tmp_path, *command, f"grpo.max_num_steps={steps}", recipe=theirs)
        code, output, errors = run.end(within_s=300)
        run.close()
        assert code == 0, errors
        assert output.startswith("migrated from NeMo RL")
        assert ("resuming" in output) == (steps == 2)
    assert [row["step"] for row in run.steps()] == [1, 2]
    assert load_config(tmp_path / "config.yaml").policy.generation.backend == "embedded"


# Answers on disk


ONE_RANK = "cluster.cpu_workers_per_node=1"


def steps_in(folder):
    return sorted(
        int(path.name.split(".")[0].removeprefix("step_")) for path in folder.glob("step_*.jsonl.gz")
    )


@pytest.mark.exhaustive
def test_kill_9_keeps_metrics_and_answers_of_every_finished_step_and_a_resume_overwrites_none(start):
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
