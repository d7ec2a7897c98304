"""A pool over members that start no process: who is replaced, how often, after which pause, and what ends the pool."""

import threading
import time

import pytest

from nemo_rl_mcore.driver.actors.pool import Budget, Pool
from nemo_rl_mcore.errors import RunStoppedError

LOST = RuntimeError("lost")


class Process:
    """A `Member` that is nothing but a number and whether it has ended."""

    def __init__(self, number):
        self.number, self.ended = number, False

    def end(self):
        self.ended = True


class Starts:
    """Starts processes; those to come of a number may fail first, by its list of errors."""

    def __init__(self, **failing):
        self.begun: list[int] = []
        self._failing = {int(name[1:]): errors for name, errors in failing.items()}

    def __call__(self, number):
        self.begun.append(number)
        if errors := self._failing.get(number):
            raise errors.pop(0)
        return Process(number)


def budget(limit, *, in_a_row=False, final=lambda _: False):
    return Budget(
        limit, 0.001, 0.003, final, lambda *_: None, in_a_row=in_a_row, spent="" if in_a_row else "none left"
    )


def pool(build, of, *, lost=lambda: None, changed=lambda: None, in_wait=False):
    return Pool("member", build, of, lost=lost, changed=changed, in_wait=in_wait)


def started(pool, count):
    pool.start(range(count))
    return pool.wait(count)


def test_a_lost_member_is_ended_and_replaced_alone_and_once():
    told = threading.Event()
    members = pool(Starts(), budget(2), changed=told.set)
    first, second = started(members, 2)
    told.clear()
    members.lose(second, LOST)
    members.lose(second, LOST)  # whoever else has found it out
    assert second.ended
    assert told.is_set()
    now = members.wait(2)
    assert now[0] is first
    assert now[1].number == 1
    assert now[1] is not second
    assert (members.restarts, members.budget.left()) == (1, 1)
    members.shutdown()
    assert all(one.ended for one in now)
    assert members.live == []


def test_the_budget_of_a_run_counts_deaths_and_failed_starts_and_then_the_pool_has_failed():
    members = pool(Starts(), budget(1))
    [one] = started(members, 1)
    members.lose(one, LOST)
    [other] = members.wait()
    last = RuntimeError("the last")
    members.lose(other, last)
    assert members.failure is last
    assert last.__notes__ == ["none left"]
    with pytest.raises(RuntimeError, match="the last"):
        members.wait()
    members.shutdown()


def test_a_start_in_a_lost_one_s_place_is_tried_again_but_the_first_of_a_run_is_not():
    starts = Starts()
    members = pool(starts, budget(3))
    [one] = started(members, 1)
    starts._failing[0] = [RuntimeError("no room"), RuntimeError("no room")]
    members.lose(one, LOST)
    assert len(members.wait()) == 1
    assert (members.restarts, starts.begun) == (3, [0] * 4)
    members.shutdown()

    members = pool(Starts(_0=[RuntimeError("wrong")]), budget(3))
    members.start([0])
    with pytest.raises(RuntimeError, match="wrong"):
        members.wait()
    assert members.restarts == 0
    members.shutdown()


def test_a_budget_in_a_row_replaces_the_lost_without_end_and_forgets_failed_starts_that_end_well():
    starts = Starts(_0=[ValueError(), ValueError()])
    members = pool(starts, budget(2, in_a_row=True))
    [one] = started(members, 1)
    for _ in range(5):
        members.lose(one, LOST)
        [one] = members.wait()
    starts._failing[0] = [ValueError(), ValueError()]
    members.lose(one, LOST)
    [one] = members.wait()
    starts._failing[0] = [ValueError("1"), ValueError("2"), ValueError("3")]
    members.lose(one, LOST)
    with pytest.raises(ValueError, match="3"):
        members.wait()
    members.shutdown()


def test_pauses_double_up_to_the_longest():
    of = budget(4)
    taken = [of.take(0, LOST, starting=False, first=False) for _ in range(4)]
    assert taken == [0.001, 0.002, 0.003, 0.003]
    assert of.take(0, RuntimeError(), starting=False, first=False) is None


def test_what_is_final_or_without_ray_replaces_nothing():
    members = pool(
        Starts(_0=[KeyError("final")]), budget(2, in_a_row=True, final=lambda e: isinstance(e, KeyError))
    )
    members.start([0])
    with pytest.raises(KeyError):
        members.wait()
    members.shutdown()

    gone: list[str | None] = [None]
    members = pool(Starts(), budget(2), lost=lambda: gone[0])
    [one] = started(members, 1)
    gone[0] = "Ray"
    members.lose(one, LOST)
    assert members.failure is LOST
    assert members.budget.left() == 2
    members.shutdown()


def test_members_that_wait_for_room_start_when_they_are_waited_for():
    starts = Starts()
    members = pool(starts, budget(2), in_wait=True)
    one, _ = started(members, 2)
    members.lose(one, LOST)
    time.sleep(0.05)
    assert starts.begun == [0, 1]
    assert len(members.wait()) == 2
    members.shutdown()


def test_the_end_is_not_kept_by_a_start_and_ends_whoever_waits():
    ended: list[Process] = []
    going_on = threading.Event()

    def build(number):
        going_on.set()
        while not members.closed:
            time.sleep(0.005)
        ended.append(Process(number))
        return ended[0]

    members = pool(build, budget(2))
    members.start([0])
    going_on.wait(5)
    threading.Timer(0.05, members.shutdown).start()
    with pytest.raises(RunStoppedError):
        members.wait()
    members.shutdown()
    assert [one.ended for one in ended] == [True]
    assert members.live == []


def test_a_start_that_comes_with_the_end_is_none():
    """A start that began between the look at the threads and its own was joined before it had begun."""
    starts, fresh = Starts(), threading.Event()
    of = pool(starts, budget(1))

    def begin():
        while not fresh.wait(0.0001):
            of.start([0])

    beginning = threading.Thread(target=begin)
    beginning.start()
    try:
        of.stop_starts()
    finally:
        fresh.set()
        beginning.join(5)
    begun = len(starts.begun)
    of.start([1])
    assert len(starts.begun) == begun
