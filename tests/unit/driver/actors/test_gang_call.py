"""Calls that need not block: polled, waited for together, refused while another is pending; real Ray actors."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import ray
from refusals import refused

from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.failures import WorkerCall, WorkerError
from nemo_rl_mcore.driver.actors.gang import GroupInUseError, PendingCall, RayWorkerGroup
from nemo_rl_mcore.driver.signals import stop_signals
from nemo_rl_mcore.rank import activity

pytestmark = pytest.mark.stage("processes")

# pytest's module names mean nothing to a worker.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Rank:
    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        activity.advance("idle")

    def pause(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def work(self, pieces: int) -> int:
        for piece in range(pieces):
            activity.advance(f"piece {piece}")
            time.sleep(0.3)
        return self.rank

    def fail(self, on: int, hang: int = -1) -> int:
        if self.rank == hang:
            time.sleep(600)
        if self.rank == on:
            raise KeyError("no such row")
        return self.rank


@pytest.fixture(scope="module")
def policy(cluster: RayCluster) -> Iterator[RayWorkerGroup]:
    with RayWorkerGroup(Rank, cluster, name="policy") as group:
        yield group


@pytest.fixture(scope="module")
def teacher(cluster: RayCluster) -> Iterator[RayWorkerGroup]:
    with RayWorkerGroup(Rank, cluster, name="teacher") as group:
        yield group


def polled(done: Callable[[], bool], every_s: float = 0.05, within_s: float = 30) -> float:
    """Ask until it is done, never held up by the asking; returns the seconds."""
    began = time.monotonic()
    while True:
        asked = time.monotonic()
        answer = done()
        assert time.monotonic() - asked < 4.0, "asking must not wait for a rank"
        if answer:
            return time.monotonic() - began
        assert time.monotonic() - began < within_s
        time.sleep(every_s)


def test_a_call_returns_while_the_ranks_work_and_is_done_when_they_have_answered(
    policy: RayWorkerGroup,
) -> None:
    began = time.monotonic()
    call = policy.call("pause", 1.5, context="call 1")
    assert not call.look()
    assert time.monotonic() - began < 1.0
    assert polled(call.look) > 0.4
    assert call.result() == call.result() == [0, 1]


def test_one_thread_waits_for_calls_to_several_groups(
    policy: RayWorkerGroup, teacher: RayWorkerGroup
) -> None:
    began = time.monotonic()
    calls = {"slow": policy.call("pause", 2.0), "quick": teacher.call("pause", 0.2)}
    order: list[str] = []

    def all_done() -> bool:
        order.extend(name for name, call in calls.items() if name not in order and call.look())
        return len(order) == 2

    polled(all_done)
    assert order == ["quick", "slow"]
    assert [call.result() for call in calls.values()] == [[0, 1], [0, 1]]
    assert time.monotonic() - began < 4, "they ran at the same time"


def test_a_pending_call_tells_what_each_rank_said_last(policy: RayWorkerGroup) -> None:
    call = policy.call("work", 8, timeout_s=4)
    assert (call.timeout_s, call.watch.progress) == (4, {})
    polled(lambda: call.look() or len(call.watch.progress) == 2)
    said = {rank: told.doing for rank, told in call.watch.progress.items()}
    assert set(said) == {0, 1}
    assert all(doing.startswith("piece ") for doing in said.values())
    call.result()
    assert call.watch.progress[0].count >= 1


def test_deadlines_do_not_pass_while_nobody_asks(policy: RayWorkerGroup) -> None:
    call = policy.call("pause", 3.5, timeout_s=2)
    assert not call.look()
    time.sleep(2.5)
    assert not call.look(), "2.5 s have passed in which nobody could hear of progress"
    assert call.result() == [0, 1]


def test_a_second_call_while_one_is_pending_is_refused_by_both_names(policy: RayWorkerGroup) -> None:
    call = policy.call("pause", 0.5, context="call 1")
    with pytest.raises(GroupInUseError, match=r"^fail \(call 2\) .* policy is at pause \(call 1\)"):
        policy.run_all("fail", on=0, context="call 2")
    polled(call.look)
    with pytest.raises(GroupInUseError, match="pause"):
        policy.call("pause", 0)
    assert call.result() == [0, 1]
    assert policy.run_all("pause", 0) == [0, 1]


def test_a_second_thread_is_told_whose_call_it_meets(policy: RayWorkerGroup) -> None:
    waiting = threading.Thread(target=lambda: policy.run_all("pause", 1.5, context="first"))
    waiting.start()
    time.sleep(0.5)
    with pytest.raises(GroupInUseError, match=r"pause \(mine\) .* pause \(first\)"):
        policy.run_all("pause", 0, context="mine")
    waiting.join()
    assert policy.run_all("pause", 0) == [0, 1]


def test_a_failure_says_which_group_and_that_it_can_be_called_again(
    policy: RayWorkerGroup, teacher: RayWorkerGroup
) -> None:
    failing, well = policy.call("fail", on=1), teacher.call("pause", 0.1)
    polled(failing.look)
    with pytest.raises(WorkerError, match=r"^policy rank 1 \(") as caught:
        failing.result()
    failure = caught.value
    assert (failure.group, failure.rank, failure.method, failure.usable) == ("policy", 1, "fail", True)
    assert isinstance(failure.cause, KeyError)
    with pytest.raises(WorkerError) as again:
        failing.result()
    assert again.value is caught.value
    assert well.result() == policy.run_all("pause", 0) == [0, 1]


def test_polling_never_waits_for_the_grace_of_the_other_ranks_and_a_lost_group_says_so(
    cluster: RayCluster,
) -> None:
    with RayWorkerGroup(Rank, cluster, name="value") as group:
        call = group.call("fail", on=0, hang=1)
        assert 4.5 < polled(call.look) < 30
        with pytest.raises(WorkerError, match=r"^value rank 0 ") as caught:
            call.result()
        assert (caught.value.group, caught.value.usable) == ("value", False)
        with refused("ended-before", "value rank 0", by=WorkerError) as later:
            group.call("pause", 0)
        assert (later.value.group, later.value.usable) == ("value", False)


def test_a_first_interrupt_waits_for_the_call_a_second_one_ends_the_group(cluster: RayCluster) -> None:
    def interrupt_after(*delays: float) -> None:
        for delay in delays:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()

    with RayWorkerGroup(Rank, cluster, name="policy") as group, stop_signals():
        began = time.monotonic()
        call = group.call("pause", 2.0)
        interrupt_after(0.5)
        with pytest.raises(KeyboardInterrupt):
            call.result()
        assert time.monotonic() - began > 1.8
        assert call.result() == [0, 1]
    with RayWorkerGroup(Rank, cluster, name="policy") as group, stop_signals():
        call = group.call("pause", 60.0)
        interrupt_after(0.5, 1.5)
        with pytest.raises(KeyboardInterrupt):
            call.result()
        with refused("interrupted", "pause", by=WorkerError):
            call.result()
        with refused("ended-before", "pause", by=WorkerError):
            group.call("pause", 0)


def test_a_group_that_is_shut_down_ends_the_wait_of_another_thread(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = RayCluster.kill

    def kill_slowly(*args: object) -> None:
        killed(*args)
        time.sleep(3)  # the thread that waits hears of it before all are killed

    monkeypatch.setattr(RayCluster, "kill", kill_slowly)
    with RayWorkerGroup(Rank, cluster, name="policy") as group:
        call = group.call("pause", 60.0)
        threading.Timer(1.0, group.shutdown).start()
        began = time.monotonic()
        with refused("rank-died", "pause", by=WorkerError):
            call.result()
        assert time.monotonic() - began < 10
        with refused("shut-down", by=WorkerError):
            group.call("pause", 0)


@pytest.mark.usefixtures("cluster")
def test_answers_that_are_there_are_taken_in_two_looks_however_many_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, wait = list[int](), ray.wait

    def counted(
        refs: list[ray.ObjectRef], **options: float
    ) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
        looks.append(len(refs))
        return wait(refs, **options)

    monkeypatch.setattr(ray, "wait", counted)
    refs = {ray.put(10 * rank): rank for rank in range(20)}
    call = PendingCall(WorkerCall("pause", timeout_s=60), (), refs)
    assert call.look()
    assert call.result() == [10 * rank for rank in range(20)]
    assert looks == [20, 19]
