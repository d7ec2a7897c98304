"""The side that asks: what is admitted, what fails and waits, and how it ends; fake engines, a real ledger."""

import re
import threading
import time
from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
from fake_engines import FakeDraw, FakeEngines, MortalEngines
from processes import within
from refusals import assert_holds, assert_refused, refused

from nemo_rl_mcore.config.algorithm import AsyncRolloutsConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver import activity
from nemo_rl_mcore.driver.rollouts.asynchronous import AsynchronousScheduler
from nemo_rl_mcore.driver.rollouts.events import Segment
from nemo_rl_mcore.driver.rollouts.ledger import GroupState, Ledger, LedgerError, Limits, StepState
from nemo_rl_mcore.driver.rollouts.player import WEIGHT_VERSIONS
from nemo_rl_mcore.driver.rollouts.saved import GroupArchive, load_groups, versions_of
from nemo_rl_mcore.driver.rollouts.transcript import pace_metrics
from nemo_rl_mcore.driver.signals import deferred_stop_signals, stop_signals
from nemo_rl_mcore.errors import FolderError, RunStoppedError

N = 3


def kept_in(folder):
    return GroupArchive(folder, 1e9, checkpoints=True)


@contextmanager
def started(engines, *, last_step=6, version=0, kept=(), **keys):
    section = AsyncRolloutsConfig.model_validate({"enabled": True, "max_trajectory_age_steps": 0, **keys})
    limits = Limits(N, section.max_trajectory_age_steps, last_step, section.max_generation_failures + 1)
    events = []
    ledger = Ledger(limits, events.append, version=version)
    with AsynchronousScheduler(
        *(ledger, {}, engines, FakeDraw(N), *kept), section=section, key="grpo.async_grpo"
    ) as rollouts:
        rollouts.events = events
        rollouts.update_weights(version)
        yield rollouts


def train_a_step(rollouts, at_least=N):
    """The chunks, the oldest version of a token, and the step's pace."""
    rollouts.ledger.begin()
    chunks = [*rollouts.leases(at_least)]
    groups = [rollouts.groups.get(position) for chunk in chunks for position in chunk]
    rollouts.finishing()
    pace = rollouts._pace
    rollouts.finish([rollouts.draw.rollout_of([], [group]) for group in groups])
    return chunks, min(int(group[WEIGHT_VERSIONS].min()) for group in groups), pace


@pytest.mark.parametrize("max_age", [0, 1, 2])
@pytest.mark.parametrize("in_flight", [True, False])
def test_steps_take_their_groups_in_order_and_none_is_older_than_allowed(max_age, in_flight):
    engines = FakeEngines(hold=lambda ticket: 0.002)
    keys = {"max_trajectory_age_steps": max_age, "in_flight_weight_updates": in_flight}
    with started(engines, **keys) as rollouts:
        for step in range(1, 7):
            chunks, oldest, _ = train_a_step(rollouts)
            assert chunks == [[*range((step - 1) * N, step * N)]]
            assert step - 1 - oldest <= max_age
            rollouts.update_weights(step)
        assert engines.most_in_flight <= (max_age + 1) * N
    assert engines.updates == [0, 1, 2, 3, 4, 5, 6]
    if not in_flight:
        assert not any(engines.in_flight_at_updates)
    assert len(engines.asked) == len({*engines.asked}) == 6 * N, "each group is asked for once"
    assert set(engines.steps.values()) == {1, 2, 3, 4, 5, 6}, "the noise is of the step that drew the prompt"
    assert (rollouts.draw.threads, engines.threads) == ({threading.current_thread().name}, {"rollouts"})


def test_weights_that_the_engines_hold_already_wait_for_no_answer():
    slow = threading.Event()
    engines = FakeEngines(hold=lambda ticket: 0.2 if slow.is_set() else 0.0)
    keys = {"max_trajectory_age_steps": 1, "in_flight_weight_updates": False}
    with started(engines, **keys) as rollouts:
        train_a_step(rollouts)
        slow.set()
        rollouts.update_weights(1)  # nothing is in flight any more; what was made room for is asked for
        assert within(30, lambda: engines.in_flight == N)
        rollouts.update_weights(1)
        assert engines.in_flight == N, "they are answered while the next step trains"


def test_weights_that_change_while_a_group_is_answered_are_told_token_by_token():
    engines = FakeEngines(hold=lambda ticket: 0.05)
    with started(engines, max_trajectory_age_steps=1, max_inflight_prompts=N) as rollouts:
        train_a_step(rollouts)
        assert within(30, lambda: engines.in_flight > 0)
        time.sleep(0.08)
        rollouts.update_weights(1)
        _, oldest, _ = train_a_step(rollouts)
        assert oldest == 0
    segments = {event.segments for event in rollouts.events if event.kind == "committed"}
    assert (Segment(0, 0),) in segments
    assert any(
        [one.version for one in several] == [0, 1] and several[1].first > 0
        for several in segments
        if len(several) > 1
    )


def test_a_chunk_comes_as_soon_as_so_many_groups_are_there():
    engines = FakeEngines(hold=lambda ticket: 0.2 if ticket.startswith("group 2,") else 0.0)
    with started(engines) as rollouts:
        rollouts.ledger.begin()
        chunks = rollouts.leases(1)
        first = next(chunks)
        assert 2 not in first
        assert [p for chunk in [first, *chunks] for p in chunk] == [0, 1, 2]


def test_what_the_algorithm_adds_to_a_chunk_is_not_missing_from_the_next_one():
    engines = FakeEngines(hold=lambda ticket: 0.05 if ticket.startswith("group 2,") else 0.0)
    with started(engines) as rollouts, rollouts.open_step(1) as step:
        rows = 0
        for chunk in step.chunks(1):
            chunk.batch["advantages"] = torch.zeros(chunk.batch.size)
            rows += chunk.batch.size
        assert rows == rollouts.draw.checked == 2 * N
        step.finishing()
        assert step.finish()["async/age_max"] == 0


def test_no_more_groups_are_in_flight_than_the_limit():
    engines = FakeEngines(hold=lambda ticket: 0.005)
    with started(engines, max_trajectory_age_steps=2, max_inflight_prompts=4) as rollouts:
        for step in range(1, 7):
            train_a_step(rollouts)
            rollouts.update_weights(step)
    assert engines.most_in_flight == 4


def fails_once(engines_of, what):
    def fail(ticket):
        return what if ticket in engines_of and engines_of.remove(ticket) is None else None

    return fail


def test_a_group_that_fails_too_often_is_dropped_and_the_next_one_takes_its_place():
    bad = ["group 1, attempt 0.1", "group 1, attempt 0.2"]
    # Others are answered between its two attempts, so that the failures are not in a row.
    hold = {bad[0]: 0.0, bad[1]: 0.03}
    engines = FakeEngines(
        fail=fails_once([*bad], ValueError("no")), hold=lambda ticket: hold.get(ticket, 0.01)
    )
    with started(engines, last_step=2, max_generation_failures=1) as rollouts:
        first, _, pace = train_a_step(rollouts)
        rollouts.update_weights(1)
        second, _, _ = train_a_step(rollouts)
        rollouts.update_weights(2)
        assert (first, second) == ([[0, 2, 3]], [[4, 5, 6]])
        assert (pace.requeued, pace.dropped) == ({"ValueError": 1}, {"ValueError": 1})
        assert engines.steps["group 1, attempt 0.2"] == 1, "with the same noise"
        assert rollouts.draw.steps == [1, 2, 3], "the last place is taken by a prompt behind the last step"


def test_one_failure_too_many_ends_the_run_with_its_error():
    engines = FakeEngines(fail=fails_once(["group 1, attempt 0.1"], ValueError("bad")))
    with started(engines) as rollouts:
        rollouts.ledger.begin()
        with pytest.raises(ValueError, match="bad") as caught:
            next(rollouts.leases(N))
        assert "grpo.async_grpo.max_generation_failures: 0 " in caught.value.__notes__[0]


def test_a_group_that_takes_too_long_is_given_up_and_asked_for_again():
    slow = ["group 0, attempt 0.1"]
    engines = FakeEngines(hold=lambda ticket: 60.0 if ticket in slow else 0.0)
    with started(engines, max_generation_failures=1, rollout_timeout_s=0.1) as rollouts:
        chunks, _, pace = train_a_step(rollouts)
        assert chunks == [[0, 1, 2]]
        assert (engines.cancelled, pace.requeued) == (slow, {"timeout": 1})
    engines = FakeEngines(hold=lambda ticket: 60.0)
    with started(engines, rollout_timeout_s=0.1) as rollouts:
        rollouts.ledger.begin()
        with refused("rollout-timeout", "0.1 s", "grpo.async_grpo.rollout_timeout_s", by=RunStoppedError):
            next(rollouts.leases(N))


class HaltingEngines(FakeEngines):
    """Pauses all groups from the first update after the start on, which breaks off, until the next one."""

    def __init__(self):
        super().__init__(hold=lambda ticket: 60.0 if self.paused else 0.01)
        self.paused = False

    def update_weights(self, version):
        if self.updates and not self.paused:
            self.paused = True
            within(30, lambda: self.in_flight == N)
            raise RunStoppedError("policy rank 1 died in send_weights")
        super().update_weights(version)
        self.paused = False


def test_the_time_in_which_a_refit_that_broke_off_has_engines_wait_does_not_count_against_groups():
    engines = HaltingEngines()
    keys = {"max_trajectory_age_steps": 1, "max_inflight_prompts": N, "rollout_timeout_s": 0.3}
    with started(engines, **keys) as rollouts:
        train_a_step(rollouts)
        with pytest.raises(RunStoppedError, match="send_weights"):
            rollouts.update_weights(1)
        assert within(30, lambda: len(engines.cancelled) >= N)  # new ranks take longer than a group may
        rollouts.update_weights(1)
        _, _, pace = train_a_step(rollouts)
        assert pace.requeued["timeout"] >= N
        assert not pace.dropped


def test_groups_of_a_dead_engine_wait_for_the_one_that_starts_and_it_is_not_counted_against_them():
    engines = MortalEngines(hold=lambda ticket: 0.03)
    with started(engines, max_generation_failures=0) as rollouts:
        threading.Timer(0.05, engines.die).start()
        threading.Timer(0.5, engines.start).start()
        chunks, _, pace = train_a_step(rollouts)
        assert chunks == [[0, 1, 2]]
        assert engines.rejoined == [(0, threading.current_thread().name)]
        assert 0 < pace.requeued["EngineDiedError"] <= N  # the others were ready before
        assert (pace.dropped, pace.engine_restarts) == ({}, 1)
        attempts = {ticket: step for ticket, step in engines.steps.items() if ticket.endswith("0.2")}
        assert attempts == {f"group {position}, attempt 0.2": 1 for position in range(N)}, (
            "with the same noise"
        )
    cancelled = [event for event in rollouts.events if event.kind == "cancelled"]
    assert [event.reason for event in cancelled] == ["EngineDiedError"] * N


def test_nobody_is_asked_while_no_engine_answers_and_the_next_update_asks_again():
    engines = MortalEngines()
    with started(engines, max_trajectory_age_steps=1) as rollouts:
        train_a_step(rollouts)
        assert within(30, lambda: rollouts.ledger.count(GroupState.INFLIGHT) == 0)
        engines.die()
        asked = len(engines.asked)
        rollouts._dispatch()
        assert len(engines.asked) == asked
        rollouts.update_weights(1)
        assert engines.rejoined == []
        train_a_step(rollouts)


def test_an_update_that_waits_for_groups_to_end_does_not_wait_for_a_dead_engines():
    engines = MortalEngines(hold=lambda ticket: 0.1 if ticket.startswith(("group 4,", "group 5,")) else 0.0)
    with started(engines, max_trajectory_age_steps=1, in_flight_weight_updates=False) as rollouts:
        train_a_step(rollouts)
        assert within(30, lambda: engines.in_flight > 0)
        engines.die()
        engines.start()
        rollouts.update_weights(1)  # the ranks have other weights already: nothing is rejoined
        assert engines.rejoined == []
        train_a_step(rollouts)


@pytest.mark.parametrize("hold_s", [0.05, 60.0], ids=["the group tells", "the engines tell"])
def test_an_engine_that_is_not_started_again_ends_the_run_at_once(hold_s):
    engines = MortalEngines(hold=lambda ticket: hold_s)
    with started(engines, max_generation_failures=9) as rollouts:
        rollouts.ledger.begin()
        threading.Timer(0.02, engines.die, [RunStoppedError("no restart")]).start()
        began = time.monotonic()
        with pytest.raises(RunStoppedError, match="no restart") as caught:
            next(rollouts.leases(N))
        assert not hasattr(caught.value, "__notes__"), "that groups failed says nothing here"
        assert time.monotonic() - began < 30


def test_the_start_of_engines_is_no_stall():
    class Slow(FakeEngines):
        def update_weights(self, version):
            time.sleep(0.5)
            super().update_weights(version)

    with started(Slow(hold=lambda ticket: 0.02), stall_timeout_s=0.3) as rollouts:
        train_a_step(rollouts)


class AnswersWithOldWeights(FakeEngines):
    async def respond(self, data, *, step, ticket):
        answered = await super().respond(data, step=step, ticket=ticket)
        return BatchedDataDict(answered, **{WEIGHT_VERSIONS: answered[WEIGHT_VERSIONS] - 1})


def test_an_engine_that_answers_with_older_weights_than_it_was_given_ends_the_run_at_once():
    with started(AnswersWithOldWeights(), version=2, max_generation_failures=9) as rollouts:
        rollouts.ledger.begin()
        with refused("token-versions", [1], by=LedgerError):
            next(rollouts.leases(N))


@pytest.mark.parametrize("finishing", [False, True])
def test_a_step_that_is_given_up_gives_its_groups_back(finishing):
    with started(FakeEngines()) as rollouts:
        with suppress(KeyboardInterrupt), rollouts.open_step(1):
            chunks = [*rollouts.leases(N)]
            if finishing:
                rollouts.finishing()
            raise KeyboardInterrupt
        assert rollouts.ledger.step is StepState.IDLE
        again, _, _ = train_a_step(rollouts)
        assert again == chunks


def test_the_end_gives_up_what_is_in_flight():
    engines = FakeEngines(hold=lambda ticket: 60.0)
    began = time.monotonic()
    with started(engines) as rollouts:
        assert within(30, lambda: engines.in_flight == N)
    assert time.monotonic() - began < 30
    assert engines.in_flight == 0
    assert rollouts.ledger.count(GroupState.INFLIGHT) == N, "the log says that they were not answered"


def test_data_and_prompts_of_trained_steps_are_forgotten():
    with started(FakeEngines(), last_step=30, max_trajectory_age_steps=1) as rollouts:
        for step in range(1, 31):
            train_a_step(rollouts)
            rollouts.update_weights(step)
            assert len(rollouts.groups) <= 2 * N
            assert len(rollouts._drawn.steps) <= 4


def test_groups_are_kept_until_a_checkpoint_and_written_where_that_is_asked_for(tmp_path):
    with started(FakeEngines(), kept=(True, kept_in(tmp_path / "groups"))) as rollouts:
        for step in range(1, 4):
            train_a_step(rollouts)
            rollouts.update_weights(step)
        assert {*range(3 * N)} <= {*rollouts.groups}
        rollouts.checkpointed(2)
        assert {*range(2 * N)}.isdisjoint(rollouts.groups)
        assert {*range(2 * N, 3 * N)} <= {*rollouts.groups}
    kept = load_groups(tmp_path / "groups" / "step_2")
    assert [*kept] == [3, 4, 5]
    assert kept[4]["input_ids"].shape == (2, 4)


def test_a_step_whose_weights_nobody_was_given_is_put_away_at_the_end(tmp_path):
    with started(FakeEngines(), kept=(False, kept_in(tmp_path))) as rollouts:
        train_a_step(rollouts)
    assert [*load_groups(tmp_path / "step_1")] == [0, 1, 2]


def test_a_folder_that_cannot_be_written_to_is_told_once_the_step_is_finished(tmp_path):
    (tmp_path / "groups").write_text("in the way")
    with started(FakeEngines(), kept=(False, kept_in(tmp_path / "groups"))) as rollouts:
        train_a_step(rollouts)
        with pytest.raises(FolderError, match=r"logger.log_dir: .*groups "):
            rollouts.update_weights(1)


def test_segments_begin_where_the_oldest_weights_of_a_group_change():
    versions = torch.tensor([[3, 3, 4, 4, -1], [3, 4, 4, 5, 5], [3, -1, -1, -1, -1]])
    group = BatchedDataDict(weight_versions=versions)
    assert versions_of(group, 9) == [Segment(0, 3), Segment(2, 4), Segment(4, 5)]
    several_turns = BatchedDataDict(weight_versions=torch.tensor([[-1, 3, -1, 4], [2, -1, -1, -1]]))
    assert versions_of(several_turns, 9) == [Segment(0, 2), Segment(1, 4)]


def test_training_that_waits_for_groups_to_end_before_an_update_is_idle():
    engines = FakeEngines(hold=lambda ticket: 0.05 if ticket.startswith(("group 4,", "group 5,")) else 0.0)
    with started(engines, max_trajectory_age_steps=1, in_flight_weight_updates=False) as rollouts:
        train_a_step(rollouts)
        began = time.monotonic()
        rollouts.update_weights(1)
        drained_s = time.monotonic() - began
        assert drained_s > 0.1, "two of the six groups were in flight"
        _, _, pace = train_a_step(rollouts)
        idle = pace_metrics(pace, time.monotonic())["async/trainer_idle"]
    assert pace.trainer_idle_s >= 0.9 * drained_s
    assert 0.2 < idle <= 1, "a share of the time that the update is part of"


# Who notices that nothing moves, wherever the thread that trains stands, and what is said of both sides


LIMIT_S, NEVER_S = 0.3, 60.0
WATCHED = {"last_step": 9, "stall_timeout_s": LIMIT_S}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not {"rollouts", "stall watch"} & {thread.name for thread in threading.enumerate()}


def lines_of(error):
    """What is said of the run, of training and of the engines."""
    _, training, engines, *_ = str(error).splitlines()
    assert_refused(error, "stalled", f" {LIMIT_S:g} s (grpo.async_grpo.stall_timeout_s)")
    return training, engines


@contextmanager
def stalls_within(seconds):
    """The error of the block, which must come in time."""
    began = time.monotonic()
    with pytest.raises(RunStoppedError) as caught:
        yield caught
    assert LIMIT_S <= time.monotonic() - began < seconds


def custom_reward():
    try:
        time.sleep(NEVER_S)
    except Exception:  # noqa: BLE001  # as custom code likes to
        return 0.0


def test_code_that_never_returns_is_ended_and_both_sides_are_told():
    engines = FakeEngines(hold=lambda _: NEVER_S)
    train, scoring = activity.at("train"), activity.at("scoring 4 responses")
    with stop_signals(), stalls_within(30) as stalled, started(engines, **WATCHED), train, scoring:
        custom_reward()
    training, engines = lines_of(stalled.value)
    assert re.fullmatch(r"training: train \(\d+\.\d s\), scoring 4 responses \(\d+\.\d s\)", training)
    each = (rf"group {number}, attempt 0\.1 \(\d+\.\d s\) at engine 0" for number in range(N))
    assert re.fullmatch(rf"engines: groups in flight: {', '.join(each)}", engines)
    assert "time.sleep(NEVER_S)" in str(stalled.value), "where it stood"


@pytest.mark.parametrize("listening", [True, False])
def test_a_wait_for_groups_is_ended_whether_or_not_signals_reach_it(listening):
    engines = FakeEngines(hold=lambda ticket: NEVER_S if "group 0" in ticket else 0.0)
    heard = stop_signals() if listening else nullcontext()
    with stalls_within(30) as stalled, started(engines, **WATCHED) as rollouts, heard:
        rollouts.ledger.begin()
        next(rollouts.leases(N))
    training, engines = lines_of(stalled.value)
    assert_holds(
        training, "training: taking 3 groups at least (", ", waiting for groups to train on, 2 ready ("
    )
    assert re.fullmatch(
        r"engines: groups in flight: group 0, attempt 0\.1 \(\d+\.\d s\) at engine 0", engines
    )


def test_a_thread_other_than_the_main_one_hears_of_it_when_it_waits():
    caught = []

    def train():
        try:
            with started(FakeEngines(hold=lambda _: NEVER_S), **WATCHED) as rollouts:
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
        started(FakeEngines(), **WATCHED),
        deferred_stop_signals(),
        finish,
    ):
        time.sleep(NEVER_S)
    training, engines = lines_of(stalled.value)
    assert training.startswith("training: finish_train_step")
    assert engines.startswith("engines: no group is in flight: none may be asked for before a step ends")


def test_a_block_that_is_never_cut_comes_to_its_end():
    ended = []
    with stop_signals(), stalls_within(30), started(FakeEngines(), **WATCHED):
        with deferred_stop_signals(hold=True):
            time.sleep(3 * LIMIT_S)
            ended.append(True)
        pytest.fail("went on")
    assert ended


def test_what_may_take_long_is_no_stall_but_code_inside_that_has_no_deadline_is():
    saving, copying = activity.at("saving", timed=False), activity.at("save_checkpoint")
    with stop_signals(), started(FakeEngines(), **WATCHED), saving, copying:
        time.sleep(3 * LIMIT_S)
    validation, scoring = activity.at("validation", timed=False), activity.at("scoring", timed=True)
    with stop_signals(), stalls_within(30) as stalled, started(FakeEngines(), **WATCHED), validation, scoring:
        time.sleep(NEVER_S)
    assert "validation (0." in lines_of(stalled.value)[0]


def test_a_group_or_a_step_at_a_time_is_no_stall():
    engines = FakeEngines(hold=lambda _: 0.03)  # a token, of which a group has four
    with stop_signals(), started(engines, **WATCHED) as rollouts:
        for step in (1, 2):
            rollouts.ledger.begin()
            groups = [rollouts.groups[position] for chunk in rollouts.leases(N) for position in chunk]
            time.sleep(0.5 * LIMIT_S)
            rollouts.finishing()
            rollouts.finish([rollouts.draw.rollout_of([], groups)])
            time.sleep(0.5 * LIMIT_S)
            rollouts.update_weights(step)


def test_a_run_without_a_limit_is_not_watched():
    with started(FakeEngines(), stall_timeout_s=None):
        assert "stall watch" not in {thread.name for thread in threading.enumerate()}
