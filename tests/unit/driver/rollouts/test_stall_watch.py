"""Who notices that nothing moves, wherever the thread that trains stands, and what is said of both sides."""

import re
import threading
import time
from contextlib import contextmanager

import pytest
from fake_engines import FakeDraw, FakeEngines
from refusals import assert_refused

from nemo_rl_mcore.config.algorithm import AsyncRolloutsConfig
from nemo_rl_mcore.driver import activity
from nemo_rl_mcore.driver.rollouts.asynchronous import AsynchronousScheduler
from nemo_rl_mcore.driver.rollouts.ledger import Ledger, Limits
from nemo_rl_mcore.driver.signals import deferred_stop_signals, stop_signals
from nemo_rl_mcore.errors import RunStoppedError

N, LIMIT_S, NEVER_S = 2, 0.3, 60.0


@contextmanager
def started(engines, limit_s=LIMIT_S):
    section = AsyncRolloutsConfig(enabled=True, max_trajectory_age_steps=0, stall_timeout_s=limit_s)
    ledger = Ledger(Limits(N, 0, 9, 1), [].append)
    with AsynchronousScheduler(
        *(ledger, {}, engines, FakeDraw(N)), section=section, key="grpo.async_grpo"
    ) as rollouts:
        rollouts.update_weights(0)
        yield rollouts


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not {"rollouts", "stall watch"} & {thread.name for thread in threading.enumerate()}


def lines_of(error):
    """What is said of the run, of training and of the engines."""
    _, training, engines, *_ = str(error).splitlines()
    assert_refused(error, "stalled", f" {LIMIT_S:g} s (grpo.async_grpo.stall_timeout_s)")
    return training, engines


def stalls_within(seconds):
    """The error of the block, which must come in time."""
    return _Stalls(seconds)


class _Stalls:
    def __init__(self, seconds):
        self.seconds, self.error = seconds, None

    def __enter__(self):
        self.began = time.monotonic()
        return self

    def __exit__(self, kind, error, trace):
        assert isinstance(error, RunStoppedError), error
        took = time.monotonic() - self.began
        assert LIMIT_S <= took < self.seconds, took
        self.error = error
        return True


def custom_reward():
    try:
        time.sleep(NEVER_S)
    except Exception:  # noqa: BLE001  # as custom code likes to
        return 0.0


def test_code_that_never_returns_is_ended_and_both_sides_are_told():
    engines = FakeEngines(hold=lambda _: NEVER_S)
    train, scoring = activity.at("train"), activity.at("scoring 4 responses")
    with stop_signals(), stalls_within(30) as stalled, started(engines), train, scoring:
        custom_reward()
    training, engines = lines_of(stalled.error)
    assert re.fullmatch(r"training: train \(\d+\.\d s\), scoring 4 responses \(\d+\.\d s\)", training)
    assert re.fullmatch(
        r"engines: groups in flight: group 0, attempt 0\.1 \(\d+\.\d s\) at engine 0, "
        r"group 1, attempt 0\.1 \(\d+\.\d s\) at engine 0",
        engines,
    )
    assert "time.sleep(NEVER_S)" in str(stalled.error), "where it stood"


@pytest.mark.parametrize("listening", [True, False])
def test_a_wait_for_groups_is_ended_whether_or_not_signals_reach_it(listening):
    engines = FakeEngines(hold=lambda ticket: NEVER_S if "group 0" in ticket else 0.0)
    with stalls_within(30) as stalled, started(engines) as rollouts:
        rollouts.ledger.begin()
        if listening:
            with stop_signals():
                next(rollouts.leases(N))
        next(rollouts.leases(N))
    training, engines = lines_of(stalled.error)
    wanted = r"training: taking 2 groups at least \(\d+\.\d s\), waiting for groups to train on, 1 ready \(\d+\.\d s\)"
    assert re.fullmatch(wanted, training)
    assert re.fullmatch(
        r"engines: groups in flight: group 0, attempt 0\.1 \(\d+\.\d s\) at engine 0", engines
    )


def test_a_thread_other_than_the_main_one_hears_of_it_when_it_waits():
    caught = []

    def train():
        try:
            with started(FakeEngines(hold=lambda _: NEVER_S)) as rollouts:
                rollouts.ledger.begin()
                next(rollouts.leases(N))
        except RunStoppedError as error:
            caught.append(error)

    with stop_signals():
        thread = threading.Thread(target=train)
        thread.start()
        thread.join(30)
    assert not thread.is_alive()
    lines_of(caught[0])


def test_a_block_that_lets_a_signal_wait_is_ended_and_the_groups_that_are_there_are_told():
    finish = activity.at("finish_train_step")
    with (
        stop_signals(),
        stalls_within(30) as stalled,
        started(FakeEngines()),
        deferred_stop_signals(),
        finish,
    ):
        time.sleep(NEVER_S)
    training, engines = lines_of(stalled.error)
    assert training.startswith("training: finish_train_step")
    assert engines.startswith("engines: no group is in flight: none may be asked for before a step ends")


def test_a_block_that_is_never_cut_comes_to_its_end():
    ended = []
    with stop_signals(), stalls_within(30), started(FakeEngines()):
        with deferred_stop_signals(hold=True):
            time.sleep(3 * LIMIT_S)
            ended.append(True)
        pytest.fail("went on")
    assert ended


def test_what_may_take_long_is_no_stall_but_code_inside_that_has_no_deadline_is():
    with (
        stop_signals(),
        started(FakeEngines()),
        activity.at("saving", timed=False),
        activity.at("save_checkpoint"),
    ):
        time.sleep(3 * LIMIT_S)
    validation, scoring = activity.at("validation", timed=False), activity.at("scoring", timed=True)
    with stop_signals(), stalls_within(30) as stalled, started(FakeEngines()), validation, scoring:
        time.sleep(NEVER_S)
    assert "validation (0." in lines_of(stalled.error)[0]


def test_a_group_or_a_step_at_a_time_is_no_stall():
    engines = FakeEngines(hold=lambda _: 0.03)  # a token, of which a group has four
    with stop_signals(), started(engines) as rollouts:
        for step in (1, 2):
            rollouts.ledger.begin()
            groups = [rollouts.groups[position] for chunk in rollouts.leases(N) for position in chunk]
            time.sleep(0.5 * LIMIT_S)
            rollouts.finishing()
            rollouts.finish([rollouts.draw.rollout_of([], groups)])
            time.sleep(0.5 * LIMIT_S)
            rollouts.update_weights(step)


def test_a_run_without_a_limit_is_not_watched():
    with started(FakeEngines(), limit_s=None):
        assert "stall watch" not in {thread.name for thread in threading.enumerate()}
