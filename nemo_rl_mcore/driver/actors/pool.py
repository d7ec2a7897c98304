"""A pool of supervised processes, of which a lost one is replaced alone: engines and environments.

Runs in the driver. Each start has a thread, named after the member, which sleeps through the pause, starts
the process, puts it among the live ones, and ends. Who finds out that a member is lost calls `lose`, in any thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from nemo_rl_mcore.errors import RunStoppedError

_STARTS_END_WITHIN_S = 15.0


class Member(Protocol):
    """A process of a pool that runs; the one in its place is another member with the same number.

    end: ends the process at once; idempotent.
    """

    @property
    def number(self) -> int: ...

    def end(self) -> None: ...


@dataclass
class Budget:
    """Counts the restarts that members of a pool may take, and the pauses before.

    limit: restarts of a run, of lost members and failed starts alike, but for first starts, which are not repeated. Or,
    in_a_row, failed starts of one member in a row; those that are lost are then replaced at once, without end.
    pause_s: before a restart; doubles with each one, up to longest_s. final: true for an error after which nothing
    starts. report: gets the number, the pause and the error of a restart. spent: note on the error that finds none.
    """

    limit: int
    pause_s: float
    longest_s: float
    final: Callable[[Exception], bool]
    report: Callable[[int, float, Exception], None]
    in_a_row: bool = False
    spent: str = ""
    taken: Counter[int] = field(default_factory=Counter[int])

    def left(self, number: int = 0) -> int:
        return self.limit - self.taken[number if self.in_a_row else 0]

    def take(self, number: int, error: Exception, *, starting: bool, first: bool) -> float | None:
        """Take one restart: seconds until it is due; None where the run ends with the error.

        starting: the member failed to start, as opposed to one that was lost. first: nothing ran in its place before.
        """
        if self.in_a_row and not starting:
            return 0.0
        if first and not self.in_a_row:
            return None
        if not self.left(number) and self.spent:
            error.add_note(self.spent)
        if not self.left(number) or self.final(error):
            return None
        delay_s = min(self.longest_s, self.pause_s * 2.0 ** (self.limit - self.left(number)))
        self.taken[number if self.in_a_row else 0] += 1
        self.report(number, delay_s, error)
        return delay_s


class Pool[Living: Member]:
    """Starts members, and restarts those that are lost, while the budget lasts; then it has failed.

    A lost member is ended at once; nobody waits for the one in its place unless asked to. Any thread may call any
    method.

    noun: what messages call a member. build: starts the member with a number and gives it once it serves, or raises why
    not; it has its own deadline, and gives up soon after `closed`. lost: says what has ended without which no member
    can be reached; then nothing is replaced. changed: called from any thread, with nothing locked, when a member has
    started, is lost, or the pool failed. in_wait: members are replaced only in `wait`, when the caller has made room.
    """

    def __init__(
        self,
        noun: str,
        build: Callable[[int], Living],
        budget: Budget,
        *,
        lost: Callable[[], str | None],
        changed: Callable[[], None],
        in_wait: bool = False,
    ) -> None:
        self.failure: Exception | None = None  # for which the run ends: the budget replaces no more
        self.restarts = 0  # begun since the run started
        self._noun, self._build, self.budget = noun, build, budget
        self._lost, self._notify_owner, self._in_wait = lost, changed, in_wait
        self._live: dict[int, Living] = {}
        self._put_off: list[tuple[int, float]] = []
        self._changed, self._closed = threading.Condition(), threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def live(self) -> list[Living]:
        return sorted([*self._live.values()], key=lambda member: member.number)

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def start(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._begin_start(number, None)

    def wait(self, at_least: int = 1) -> list[Living]:
        """Wait for so many members and return all that live; raises `failure`, as each start has a deadline."""
        with self._changed:
            put_off, self._put_off = self._put_off, []
        for number, delay_s in put_off:
            self._begin_start(number, delay_s)
        if put_off:
            at_least = len(self._live) + len(put_off)
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure is not None or self.closed or len(self._live) >= at_least
            )
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise RunStoppedError(f"no {self._noun} starts any more: the run ends")
        return self.live

    def lose(self, member: Living, error: Exception) -> None:
        """Give up a member that died, hangs or is of no use, and start another one in its place; idempotent."""
        with self._changed:
            if self._live.get(member.number) is not member:
                return
            del self._live[member.number]
            delay_s = self._delay_s(member.number, error, starting=False)
        member.end()
        if delay_s is not None and self._in_wait:
            self._put_off.append((member.number, delay_s))
        elif delay_s is not None:
            self._begin_start(member.number, delay_s)
        self._notify()

    def stop_starts(self) -> None:
        """Start nothing any more, and end what is starting; idempotent. Raises RunStoppedError when a start goes on."""
        self._closed.set()
        with self._changed:
            threads = [*self._threads]  # none of them is about to begin
        for thread in threads:
            thread.join(_STARTS_END_WITHIN_S)
            if thread.is_alive():
                raise RunStoppedError(f"the {thread.name} did not end within {_STARTS_END_WITHIN_S:g} s")
        with self._changed:
            self._threads = [thread for thread in self._threads if thread.is_alive()]

    def shutdown(self) -> None:
        """End all members, also those that are starting; idempotent. Raises what `stop_starts` does."""
        self._closed.set()
        with self._changed:
            members, self._live = self.live, {}
            self._changed.notify_all()
        for member in members:
            member.end()
        self.stop_starts()

    def _delay_s(self, number: int, error: Exception, *, starting: bool, first: bool = False) -> float | None:
        if self.failure is not None or self.closed:
            return None
        possible = self._lost() is None
        delay_s = self.budget.take(number, error, starting=starting, first=first) if possible else None
        if delay_s is None:
            self.failure = error
        else:
            self.restarts += 1
        return delay_s

    def _begin_start(self, number: int, delay_s: float | None) -> None:
        name = f"start of {self._noun} {number}"
        thread = threading.Thread(target=self._start, args=(number, delay_s), name=name, daemon=True)
        with self._changed:
            if self.closed:
                return
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
            thread.start()

    def _start(self, number: int, delay_s: float | None) -> None:
        """Start a member, again as long as that fails and the budget allows; without a delay it is the first one."""
        while not self._closed.wait(delay_s or 0.0):
            try:
                member = self._build(number)
            except Exception as error:  # noqa: BLE001  # raised by whoever waits, once no restart is left
                with self._changed:
                    delay_s = self._delay_s(number, error, starting=True, first=delay_s is None)
                if delay_s is None:
                    break
            else:
                with self._changed:
                    if joins := not self.closed:
                        self._live[number] = member
                        if self.budget.in_a_row:
                            self.budget.taken[number] = 0
                if not joins:
                    member.end()
                break
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self._notify_owner()
