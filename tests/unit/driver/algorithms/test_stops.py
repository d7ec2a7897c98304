"""A run that is stopped, or saves in the background: which steps are finished, recorded and saved."""

import errno
import os
import signal
import threading
import time

import pytest
from algorithm_fakes import FakeCritic, FakePolicy, Notes, loop_run, recipe, train, trainer
from refusals import assert_holds, assert_refused
from test_recovery import Strikes, steps_of, strike

from nemo_rl_mcore.driver.algorithms.run_checkpoints import RunCheckpoints
from nemo_rl_mcore.driver.checkpoints import CheckpointStore
from nemo_rl_mcore.driver.signals import (
    TimeLimitReachedError,
    current_stop_signals,
    deferred_stop_signals,
    exit_status_of,
    stop_signals,
)
from nemo_rl_mcore.errors import CustomCodeError, FolderError, RunStoppedError, run_stopped_by


@pytest.fixture(autouse=True)
def signals(heard_hangups):
    with stop_signals() as listening:
        yield listening


def interrupt():
    signal.raise_signal(signal.SIGINT)


def interrupt_twice():
    interrupt()
    interrupt()


def fail():
    raise CustomCodeError("env.custom.type: mine:Env raised")


def begun(folder, events=None, loop=None, period=99, **top):
    """A run that is to last 5 steps."""
    store = None if folder is None else CheckpointStore(folder)
    checkpoints = RunCheckpoints(store, period, last_step=5, recipe="seed: 1\n")
    return loop_run({"max_num_steps": 5} | (loop or {}), checkpoints, events=events, **top)


def stopped(folder, events, loop=None, error=KeyboardInterrupt, **keys):
    """The run, and what is said of its end."""
    run = begun(folder, events, loop, **keys)
    with pytest.raises(error):
        run.go()
    return run, run.checkpoints.standing()


def saved(folder):
    return [checkpoint.step for checkpoint in CheckpointStore(folder).checkpoints()]


def goes_on(folder, step):
    return f"step {step} is saved in {folder / f'step_{step}'}, and the same command goes on from there"


def test_a_step_that_has_changed_nothing_is_dropped_and_the_one_before_is_saved(tmp_path):
    run, told = stopped(tmp_path, {("prepare", 3): interrupt})
    assert list(run.notes.steps) == [1, 2]
    assert run.calls[-5:] == ["step 3", "abort policy", "abort value", "save policy", "save value"]
    assert (saved(tmp_path), told) == ([2], goes_on(tmp_path, 2))


def test_engines_that_share_memory_sleep_before_ranks_bring_all_back_to_save(tmp_path):
    policy = {"offload": "grads_optimizer"}
    run, _ = stopped(tmp_path, {("prepare", 3): interrupt}, policy=policy)
    assert run.calls[-5:] == ["abort policy", "abort value", "asleep", "save policy", "save value"]


def test_a_step_that_changes_weights_is_finished_recorded_and_saved(tmp_path):
    run, told = stopped(tmp_path, {("update", 3): interrupt}, {"val_period": 1})
    assert "update 3 goes on" in run.calls
    assert "validate 3" not in run.calls
    assert list(run.notes.steps) == [1, 2, 3]
    assert "validation/number" not in run.notes.steps[3]
    assert (saved(tmp_path), told) == ([3], goes_on(tmp_path, 3))


@pytest.mark.parametrize(
    ("event", "error"),
    [(interrupt, KeyboardInterrupt), (fail, CustomCodeError), (lambda: 1 / 0, ZeroDivisionError)],
)
def test_a_validation_that_does_not_end_loses_no_step(tmp_path, event, error):
    run, _ = stopped(tmp_path, {("validate", 3): event}, {"val_period": 1}, error)
    assert list(run.notes.steps) == [1, 2, 3]
    assert "validation/number" in run.notes.steps[2]
    assert "validation/number" not in run.notes.steps[3]
    assert saved(tmp_path) == ([] if error is ZeroDivisionError else [3])


def test_a_second_signal_ends_the_run_where_it_is_and_the_truth_is_told(tmp_path):
    run, told = stopped(tmp_path, {("update", 4): interrupt_twice}, period=2)
    assert (list(run.notes.steps), saved(tmp_path)) == ([1, 2, 3], [2])
    assert "save policy" not in run.calls[-2:]
    assert_holds(told, "step 3 are lost", "second signal", goes_on(tmp_path, 2))


def test_a_second_signal_while_the_step_is_saved_leaves_the_checkpoints_before(tmp_path):
    run = begun(tmp_path, {("prepare", 4): interrupt}, period=2)
    save, calls = run.models["value"].save_checkpoint, 0

    def interrupted_save(folder, **_keys):
        nonlocal calls
        calls += 1
        if calls == 2:
            interrupt()
        save(folder)

    run.models["value"].save_checkpoint = interrupted_save
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert saved(tmp_path) == [2]
    assert_holds(run.checkpoints.standing(), "step 3 are lost", "second signal", goes_on(tmp_path, 2))


def test_without_checkpoints_what_is_lost_is_told():
    _, told = stopped(None, {("prepare", 4): interrupt})
    assert_holds(told, "1 to 3", "lost", "(checkpointing.enabled is false)")
    assert "lost" not in stopped(None, {("prepare", 1): interrupt})[1]


def test_a_resumed_run_that_finished_nothing_names_where_it_began(tmp_path):
    stopped(tmp_path, {("prepare", 3): interrupt})
    start = next(CheckpointStore(tmp_path).newest_first())
    checkpoints = RunCheckpoints(CheckpointStore(tmp_path), 99, 5, start=start, resume=str(start.folder))
    with pytest.raises(KeyboardInterrupt):
        loop_run({"max_num_steps": 5}, checkpoints, events={("prepare", 3): interrupt}).go()
    told = checkpoints.standing()
    assert_holds(told, "step 2 ", tmp_path / "step_2", "checkpointing.resume=auto")
    assert "lost" not in told


def test_a_log_folder_that_takes_no_more_loses_no_finished_step(tmp_path):
    class Full(Notes):
        def log(self, step, metrics):
            if step == 3:
                raise FolderError("logger.log_dir: full")

    run = begun(tmp_path)
    run.notes = Full()
    with pytest.raises(FolderError):
        run.go()
    assert saved(tmp_path) == [3]


def stop_run():
    raise RunStoppedError("rank 0 died\nand more")


def dead_models(run, error="abort_train_step (call 9) was not started: the worker group ended"):
    """Their ranks no longer serve: every call fails at once. Returns what was asked of them."""
    asked = []

    def fail_at_once(*_arguments):
        asked.append("call")
        raise RunStoppedError(error)

    for model in run.models.values():
        model.abort_train_step = model.save_checkpoint = fail_at_once
    return asked


@pytest.mark.parametrize(
    ("part", "event", "error", "last"),
    [
        ("prepare", fail, CustomCodeError, 2),
        ("prepare", stop_run, RunStoppedError, 2),
        ("validate", stop_run, RunStoppedError, 3),
    ],
)
def test_a_failure_that_leaves_the_ranks_sound_loses_no_finished_step(tmp_path, part, event, error, last):
    """The user's code, a dead engine, a mismatch, a step that cannot be filled: none of them is the models'."""
    run, told = stopped(tmp_path, {(part, 3): event}, {"val_period": 1}, error)
    assert (list(run.notes.steps)[-1], saved(tmp_path), told) == (last, [last], goes_on(tmp_path, last))


def die_while_interrupted():
    with deferred_stop_signals():
        interrupt()
        stop_run()


@pytest.mark.parametrize(
    ("event", "error"), [(stop_run, RunStoppedError), (die_while_interrupted, KeyboardInterrupt)]
)
def test_ranks_that_are_gone_are_asked_once_and_the_reason_is_what_ended_them(tmp_path, event, error):
    run = begun(tmp_path, {("prepare", 3): event})
    asked = dead_models(run)
    with pytest.raises(error) as stop:
        run.go()
    assert str(run_stopped_by(stop.value)) == "rank 0 died\nand more"
    assert (saved(tmp_path), asked) == ([], ["call"])
    assert_holds(run.checkpoints.standing(), "1 to 2", "lost (rank 0 died)")


@pytest.mark.parametrize(("samples", "models", "saved_steps"), [(8, 1, [2]), (4, 1, []), (8, 2, [])], ids=str)
def test_an_update_that_fails_is_undone_where_it_is_one_optimizer_step(
    tmp_path, samples, models, saved_steps
):
    """A loss of the user's own that raises on the ranks: earlier optimizer steps of the rollout stay applied."""
    loop = {"num_prompts_per_step": 4, "num_generations_per_prompt": 2}
    policy = {"train_global_batch_size": samples}
    run = begun(tmp_path, {("update", 3): stop_run}, loop, policy=policy)
    if models == 1:
        del run.models["value"]
    with pytest.raises(RunStoppedError):
        run.go()
    assert saved(tmp_path) == saved_steps
    if not saved_steps:
        assert_holds(run.checkpoints.standing(), "1 to 2", "lost (the step after")


def test_a_save_that_the_limit_of_time_asked_for_and_that_fails_is_known(tmp_path):
    run = begun(tmp_path, {("update", 2): lambda: passed(60)}, **LIMIT)
    dead_models(run, "rank 1 died")
    with pytest.raises(TimeLimitReachedError) as stop:
        run.go()
    assert str(run_stopped_by(stop.value)) == "rank 1 died"


def test_a_signal_that_the_users_code_swallows_stops_the_run_after_the_step(tmp_path):
    def swallow():
        try:
            interrupt()
        except BaseException:  # noqa: BLE001
            return

    run, _ = stopped(tmp_path, {("prepare", 3): swallow})
    assert list(run.notes.steps) == [1, 2, 3]
    assert saved(tmp_path) == [3]


class RaisedInSave(RunStoppedError):
    """As a rank's: a traceback, which names the cause somewhere."""


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RaisedInSave(
            "rank 0 failed: CheckpointException ranks:dict_keys([0])\nOSError: [Errno 28] No space left"
        ),
    ],
)
def test_a_save_that_fails_names_the_folder_and_leaves_the_checkpoints_before(tmp_path, error):
    run = begun(tmp_path, period=1)
    save = run.models["value"].save_checkpoint

    def full(folder, **_keys):
        if "step_3" in folder:
            raise error
        save(folder)

    run.models["value"].save_checkpoint = full
    with pytest.raises(RunStoppedError) as caught:
        run.go()
    assert_refused(
        caught.value, "checkpoint-not-written", f"checkpointing.checkpoint_dir: {tmp_path} ", ": No space", 3
    )
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]
    assert list(run.notes.steps) == [1, 2, 3]
    reason = f"step 3 are lost (checkpointing.checkpoint_dir: {tmp_path} "
    assert_holds(run.checkpoints.standing(), reason, goes_on(tmp_path, 2))


class DiedInSave(RunStoppedError):
    """As of a rank that died: nothing was raised, and its standard error is quoted."""

    cause = None


@pytest.mark.parametrize(
    "error",
    [
        DiedInSave(
            "rank 0 died in save_checkpoint\n--- end of its standard error ---\nOSError: [Errno 5] I/O"
        ),
        RaisedInSave("rank 0 failed\nFileNotFoundError: [Errno 2] No such file or directory: '/elsewhere/x'"),
        RaisedInSave("rank 0 failed\nRuntimeError: the warning was [Errno 13] of something"),
    ],
)
def test_an_error_of_something_else_is_not_blamed_on_the_folder(tmp_path, error):
    run = begun(tmp_path, period=1)

    def fail_to_save(_folder, **_keys):
        raise error

    run.models["policy"].save_checkpoint = fail_to_save
    with pytest.raises(type(error)) as caught:
        run.go()
    assert caught.value is error


def test_a_failed_save_at_the_end_changes_neither_the_status_nor_the_reason(tmp_path):
    run = begun(tmp_path, {("prepare", 2): interrupt})

    def dead(folder, **_keys):
        raise RunStoppedError("rank 1 died\nand more")

    run.models["policy"].save_checkpoint = dead
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert_holds(run.checkpoints.standing(), "step 1 ", "lost (rank 1 died)")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_policy_and_critic_are_trained_both_or_none(tmp_path, number):
    """PPO trains the critic first: a stop in between waits for the policy, over all epochs."""

    class StoppedCritic(FakeCritic):
        def train(self, *arguments, **options):
            signal.raise_signal(number)
            return super().train(*arguments, **options)

    policy, notes = FakePolicy(), Notes()
    config = recipe("ppo", ppo={"max_num_steps": 2, "ppo_epochs": 2})
    ppo = trainer(config, policy, critic=StoppedCritic(policy.calls), observer=notes)
    with pytest.raises(KeyboardInterrupt):
        train(ppo, RunCheckpoints(CheckpointStore(tmp_path), 99, last_step=2))
    if number == signal.SIGINT:  # Ctrl-C in the second epoch is a second one; of others two at once are one
        assert (list(notes.steps), saved(tmp_path)) == ([], []), "one was trained without the other"
        return
    assert policy.calls.count("train") == policy.calls.count("train value") == 2
    assert (list(notes.steps), saved(tmp_path)) == ([1], [1])


LIMIT = {"checkpointing": {"enabled": True, "checkpoint_must_save_by": "00:00:01:00"}}


def passed(seconds):
    current_stop_signals().began = time.monotonic() - seconds


def test_a_step_that_would_not_fit_the_limit_of_time_is_not_begun(tmp_path, signals):
    def slow():
        time.sleep(0.05)
        passed(59.93)

    run, told = stopped(tmp_path, {("update", 2): slow}, error=TimeLimitReachedError, **LIMIT)
    assert list(run.notes.steps) == [1, 2], "the longest step and a save as long are 0.1 s"
    assert (saved(tmp_path), told) == ([2], goes_on(tmp_path, 2))
    assert exit_status_of(KeyboardInterrupt(), signals) == 0


def test_a_step_that_outlasts_the_limit_of_time_is_dropped_and_the_one_before_is_saved(tmp_path, signals):
    def begin_late():
        passed(57)

    def hang():
        threading.Event().wait(30)

    events = {("update", 2): begin_late, ("prepare", 3): hang}
    began = time.monotonic()
    run, _ = stopped(tmp_path, events, error=TimeLimitReachedError, **LIMIT)
    assert time.monotonic() - began < 25
    assert (list(run.notes.steps), saved(tmp_path)) == ([1, 2], [2])
    assert exit_status_of(KeyboardInterrupt(), signals) == 0


# Checkpoints that are written in the background


def in_background(folder, events=None, *, looks=1, period=2, reasons=None, **top):
    """A run of 5 steps whose policy is written while it goes on, after so many looks."""
    checkpoints = RunCheckpoints(
        CheckpointStore(folder), period, last_step=5, in_background=frozenset({"policy"})
    )
    top = {"cluster": {"max_trainer_restarts": 3}, "checkpointing": {"enabled": True}} | top
    run = loop_run({"max_num_steps": 5}, checkpoints, reasons, events, **top)
    run.models["policy"].looks = looks
    return run


def test_steps_go_on_while_a_copy_is_written(tmp_path):
    seen = {}
    events = {
        ("prepare", step): lambda step=step: seen.update({step: saved(tmp_path)}) for step in range(1, 6)
    }
    run = in_background(tmp_path, events)
    run.go()
    assert seen == {1: [], 2: [], 3: [], 4: [2], 5: [2]}
    assert saved(tmp_path) == run.notes.saved == [2, 4, 5]


@pytest.mark.parametrize("looks", [0, 1, 9])
def test_a_save_waits_for_the_one_before_and_the_run_for_the_last(tmp_path, looks):
    run = in_background(tmp_path, looks=looks, period=1)
    run.go()
    assert saved(tmp_path) == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step}" for step in range(1, 6)]


def test_a_stop_completes_what_is_written_and_saves_the_last_step(tmp_path):
    run = in_background(tmp_path, {("prepare", 4): interrupt}, looks=9)
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert saved(tmp_path) == [2, 3]


def test_a_second_signal_does_not_wait(tmp_path):
    run = in_background(tmp_path, {("prepare", 4): interrupt}, looks=9)
    run.models["policy"].on_written = interrupt
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert saved(tmp_path) == []
    assert_holds(run.checkpoints.standing(), "steps 1 to 3 are lost", "second signal")


@pytest.mark.parametrize("usable", [True, False])
def test_the_last_step_is_saved_again_where_its_copy_could_not_be_written(tmp_path, usable):
    run = in_background(tmp_path, looks=9, period=99)
    fails = run.models["policy"].on_written = Strikes(usable=usable)
    if not usable:
        fails.first = strike(run)
    run.go()
    assert saved(tmp_path) == run.notes.saved == [5]
    assert steps_of(run.calls).count("redo 5") == (not usable)


def test_a_first_signal_waits_for_a_copy_while_ranks_are_brought_back(tmp_path):
    raises = Strikes(usable=True)
    run = in_background(tmp_path, {("update", 5): raises}, looks=9)
    raises.first = lambda: setattr(run.models["policy"], "on_written", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert saved(tmp_path) == [2, 4]


def test_a_full_disk_ends_the_run_and_names_the_folder(tmp_path):
    run = in_background(tmp_path)

    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run.models["policy"].on_written = full
    with pytest.raises(RunStoppedError) as caught:
        run.go()
    assert_refused(caught.value, "checkpoint-not-written", "checkpointing.checkpoint_dir: ", ": No space", 2)
    assert saved(tmp_path) == []
    assert not [path for path in tmp_path.iterdir() if path.name == "tmp_step_2"]


def test_too_many_skipped_steps_leave_the_checkpoint_that_was_begun(tmp_path):
    run = in_background(tmp_path, looks=9, reasons={3: ["grad"], 4: ["grad"]}, max_consecutive_skips=2)
    with pytest.raises(RunStoppedError):
        run.go()
    assert saved(tmp_path) == [2]


@pytest.mark.parametrize(
    ("looks", "passed_s"), [(0, 59.7), (9, 59.2)], ids=["one save", "and the rest of one"]
)
def test_a_limit_of_time_counts_what_is_written_in_the_background(tmp_path, looks, passed_s):
    events = {("update", 3): lambda: passed(passed_s)}
    run = in_background(tmp_path, events, looks=looks, period=1, **LIMIT)
    with pytest.raises(TimeLimitReachedError):
        run.go()
    assert [*run.notes.steps] == [1, 2, 3], "a copy takes 0.5 s to write, and less is left for it"
    assert saved(tmp_path) == [1, 2, 3]
