"""An asynchronous run whose driver is killed goes on from its checkpoint with neither gap nor repeat."""

import json
import os
import signal
from itertools import chain

import pytest
from commands import run
from grpo_run import Run

pytestmark = pytest.mark.stage("distributed")

STEPS, GROUPS, PERIOD = 8, 8, 3
TINY = (
    *("policy.generation.colocated.enabled=false", "grpo.async_grpo.enabled=true"),
    *("loss_fn.use_importance_sampling_correction=true", "loss_fn.truncated_importance_sampling_type=tis"),
    *("loss_fn.truncated_importance_sampling_ratio=2.0", "grpo.val_at_end=false"),
    *(f"grpo.num_prompts_per_step={GROUPS}", "grpo.num_generations_per_prompt=8"),
    *("policy.train_global_batch_size=64", "policy.train_micro_batch_size=64"),
    *("logger.tensorboard_enabled=false", "cluster.cpu_workers_per_node=1"),
    *(f"grpo.max_num_steps={STEPS}", "checkpointing.enabled=true", f"checkpointing.save_period={PERIOD}"),
)
KILLED_AFTER = PERIOD + 2


def start(folder, *overrides):
    return Run(folder, *TINY, f"checkpointing.checkpoint_dir={folder}/saved", *overrides)


def until_killed(run, after):
    """The driver alone is killed: what it has started is to end by itself."""
    try:
        run.wait_for_step(after, within_s=240)
        os.kill(run.process.pid, signal.SIGKILL)
        assert run.end(within_s=10)[0] == -signal.SIGKILL
        assert run.watch.all_gone(within_s=30)
    finally:
        run.close()


def events(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def newest_ledger(folder):
    newest = max((folder / "saved").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    return json.loads((newest / "rollouts" / "ledger.json").read_text())


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run of age 1 and of chunks that was killed and resumed: its folder, log and ledger of then, what it told."""
    folder = tmp_path_factory.mktemp("run")
    keys = (
        "grpo.async_grpo.min_groups_for_streaming_train=3",
        "grpo.async_grpo.in_flight_weight_updates=false",
    )
    until_killed(start(folder, *keys), KILLED_AFTER)
    log, saved = (folder / "groups.jsonl").read_bytes(), newest_ledger(folder)
    output = start(folder, *keys).finish()
    return folder, log, saved, output


def test_each_group_is_trained_once_and_what_was_ready_is_not_asked_again(resumed):
    folder, _, saved, told = resumed
    log = events(folder / "groups.jsonl")
    finished = [one for one in log if one["kind"] == "finished"]
    assert [one["step"] for one in finished] == [*range(1, STEPS + 1)]
    trained = [position for one in finished for position in sorted(chain(*one["chunks"]))]
    assert trained == [*range(STEPS * GROUPS)], "neither gap nor repeat"
    first, second = (number for number, one in enumerate(log) if one["kind"] == "started")
    assert [(log[at]["incarnation"], log[at]["version"]) for at in (first, second)] == [(0, 0), (1, PERIOD)]
    ready = {one["position"] for one in saved["ledger"]["groups"] if one["min_version"] is not None}
    assert ready >= {*range(PERIOD * GROUPS, (PERIOD + 1) * GROUPS)}
    asked = [one["token"]["position"] for one in log[second:] if one["kind"] == "dispatched"]
    assert len(asked) == len({*asked})
    assert {*asked} == {*range(PERIOD * GROUPS, STEPS * GROUPS)} - ready
    assert f" {len(ready)} prompts " in told


def test_what_was_logged_behind_the_checkpoint_is_set_aside(resumed):
    folder, log, saved, _ = resumed
    size = saved["log"]["size"]
    assert (folder / "groups.1.jsonl").read_bytes() == log[size:]
    assert (folder / "groups.jsonl").read_bytes()[:size] == log[:size]
    groups = {path.name for path in (folder / "groups").iterdir()}
    assert {f"step_{step}" for step in range(1, STEPS + 1)} <= groups
    assert "aside_step_4" in groups


@pytest.mark.nightly
@pytest.mark.parametrize(("kept", "after"), [(True, 0), (False, 0), (False, PERIOD)])
def test_a_replay_goes_over_the_seam_and_begins_at_it(resumed, kept, after, tmp_path):
    """At the seam the groups that the checkpoint holds are read from there: older weights have drawn them."""
    folder, *_ = resumed
    if not kept:
        (tmp_path / "groups.jsonl").write_bytes((folder / "groups.jsonl").read_bytes())
        (tmp_path / "config.yaml").write_text((folder / "config.yaml").read_text())
        folder = tmp_path
    status, output, errors = run("replay", folder, "--steps", f"{after}:{STEPS}", folder=tmp_path)
    assert status == 0, errors
    lines = output.splitlines()
    assert len(lines) == STEPS - after
    assert all(f" equal, {GROUPS} groups equal, " in line for line in lines)
