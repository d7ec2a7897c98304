"""Checkpoints that are written in the background: when they are there, and what becomes of them; over fakes."""

import errno
import os
import signal
import time

import pytest
from loop_fakes import loop_run
from refusals import assert_holds, assert_refused
from test_recovery import Strikes, steps_of, strike

from nemo_rl_mcore.driver.algorithms.run_checkpoints import RunCheckpoints
from nemo_rl_mcore.driver.checkpoints import CheckpointStore
from nemo_rl_mcore.driver.signals import TimeLimitReachedError, current_stop_signals, stop_signals
from nemo_rl_mcore.errors import RunStoppedError

LAST = 5


@pytest.fixture(autouse=True)
def signals(heard_hangups):
    with stop_signals() as listening:
        yield listening


def run_with(folder, events=None, *, looks=1, period=2, reasons=None, **top):
    checkpoints = RunCheckpoints(
        CheckpointStore(folder), period, last_step=LAST, in_background=frozenset({"policy"})
    )
    top = {"cluster": {"max_trainer_restarts": 3}, "checkpointing": {"enabled": True}} | top
    run = loop_run({"max_num_steps": LAST}, checkpoints, reasons, events, **top)
    run.models["policy"].looks = looks
    return run


def saved(folder):
    return [one.step for one in CheckpointStore(folder).checkpoints()]


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_steps_go_on_while_a_copy_is_written(tmp_path):
    seen = {}
    events = {
        ("prepare", step): lambda step=step: seen.update({step: saved(tmp_path)}) for step in range(1, 6)
    }
    run = run_with(tmp_path, events)
    run.go()
    assert seen == {1: [], 2: [], 3: [], 4: [2], 5: [2]}
    assert saved(tmp_path) == run.notes.saved == [2, 4, 5]


@pytest.mark.parametrize("looks", [0, 1, 9])
def test_a_save_waits_for_the_one_before_and_the_run_for_the_last(tmp_path, looks):
    run = run_with(tmp_path, looks=looks, period=1)
    run.go()
    assert saved(tmp_path) == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step}" for step in range(1, 6)]


def test_a_stop_completes_what_is_written_and_saves_the_last_step(tmp_path):
    run = run_with(tmp_path, {("prepare", 4): interrupt}, looks=9)
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert saved(tmp_path) == [2, 3]


def test_a_second_signal_does_not_wait(tmp_path):
    run = run_with(tmp_path, {("prepare", 4): interrupt}, looks=9)
    run.models["policy"].on_written = interrupt
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert saved(tmp_path) == []
    assert_holds(run.checkpoints.standing(), "steps 1 to 3 are lost", "second signal")


@pytest.mark.parametrize("usable", [True, False])
def test_the_last_step_is_saved_again_where_its_copy_could_not_be_written(tmp_path, usable):
    run = run_with(tmp_path, looks=9, period=99)
    fails = run.models["policy"].on_written = Strikes(usable=usable)
    if not usable:
        fails.first = strike(run)
    run.go()
    assert saved(tmp_path) == run.notes.saved == [5]
    assert steps_of(run.calls).count("redo 5") == (not usable)


def test_a_first_signal_waits_for_a_copy_while_ranks_are_brought_back(tmp_path):
    raises = Strikes(usable=True)
    run = run_with(tmp_path, {("update", 5): raises}, looks=9)
    raises.first = lambda: setattr(run.models["policy"], "on_written", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert saved(tmp_path) == [2, 4]


def test_a_full_disk_ends_the_run_and_names_the_folder(tmp_path):
    run = run_with(tmp_path)

    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run.models["policy"].on_written = full
    with pytest.raises(RunStoppedError) as caught:
        run.go()
    assert_refused(caught.value, "checkpoint-not-written", "checkpointing.checkpoint_dir: ", ": No space", 2)
    assert saved(tmp_path) == []
    assert not [path for path in tmp_path.iterdir() if path.name == "tmp_step_2"]


def test_too_many_skipped_steps_leave_the_checkpoint_that_was_begun(tmp_path):
    run = run_with(tmp_path, looks=9, reasons={3: ["grad"], 4: ["grad"]}, max_consecutive_skips=2)
    with pytest.raises(RunStoppedError):
        run.go()
    assert saved(tmp_path) == [2]


@pytest.mark.parametrize(
    ("looks", "passed_s"), [(0, 59.7), (9, 59.2)], ids=["one save", "and the rest of one"]
)
def test_a_limit_of_time_counts_what_is_written_in_the_background(tmp_path, looks, passed_s):
    def passed():
        current_stop_signals().began = time.monotonic() - passed_s

    section = {"enabled": True, "checkpoint_must_save_by": "00:00:01:00"}
    run = run_with(tmp_path, {("update", 3): passed}, looks=looks, period=1, checkpointing=section)
    with pytest.raises(TimeLimitReachedError):
        run.go()
    assert [*run.notes.steps] == [1, 2, 3], "a copy takes 0.5 s to write, and less is left for it"
    assert saved(tmp_path) == [1, 2, 3]
