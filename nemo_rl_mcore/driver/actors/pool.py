"""A pool of supervised processes (engines or environments), which replaces lost ones individually.

Everything runs in the driver. Each start has a thread, named after the member, which waits out the pause, starts the
process, adds it to the live members, and ends. Any thread that detects a lost member calls `lose`.
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
    """A running process in a pool; its replacement is a new member with the same number.

    end: an idempotent function that ends the process at once.
    """

    @property
    def number(self) -> int: ...

    def end(self) -> None: ...


@dataclass
class Budget:
    """The restarts available to a pool's members, and the pauses before them.

    limit: a run's restarts, after lost members and failed restarts; failed first starts are not repeated. in_a_row:
    count only a member's consecutive failed starts; lost members are then replaced at once, without limit. pause_s: the
    pause before a restart, which doubles each time, up to longest_s. final: returns True if an error rules out any
    further start. report: called with a restart's number, pause and error. spent: a note for the error that ends the
    run when no restarts are left.
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
        """Take one restart and return the seconds until it is due; None if the run must end with the error.

        starting: True if the member failed to start, False if a running member was lost. first: True for the first
        start in its place.
        """
        if self.in_a_row and not starting:
            return 0.0
        if first and not self.in_a_row:
            return None
        left = self.left(number)
        if not left and self.spent:
            error.add_note(self.spent)
        if not left or self.final(error):
            return None
        delay_s = min(self.longest_s, self.pause_s * 2.0 ** (self.limit - left))
        self.taken[number if self.in_a_row else 0] += 1
        self.report(number, delay_s, error)
        return delay_s


class Pool[Living: Member]:
    """Starts members and restarts lost ones until the budget is spent; then the pool has failed.

    A lost member's process is ended at once; only `wait` waits for its replacement. Any thread may call any method.

    noun: a member's name in messages. build: starts the member with the given number and returns it when ready, or
    raises; it has its own deadline, and gives up soon after `closed`. lost: returns the reason why no member is
    reachable; then none is replaced. changed: called from any thread, without a lock, when a member has started or is
    lost, or the pool has failed. in_wait: replace members only in `wait`, when the caller has made room.
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
        self.failure: Exception | None = None  # the error that ends the run: no restarts are left
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

    def start(self, numbers: Iterable[int], delay_s: float | None = None) -> None:
        """Begin to start members, after a delay unless it is their first start."""
        for number in numbers:
            name = f"start of {self._noun} {number}"
            thread = threading.Thread(target=self._start, args=(number, delay_s), name=name, daemon=True)
            with self._changed:
                if not self.closed:
                    self._threads = [*(one for one in self._threads if one.is_alive()), thread]
                    thread.start()

    def wait(self, at_least: int = 1) -> list[Living]:
        """Wait for this many members and return all live ones, or raise `failure`; each start has its own deadline."""
        with self._changed:
            put_off, self._put_off = self._put_off, []
        for number, delay_s in put_off:
            self.start([number], delay_s)
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
        """End a dead, hung or useless member and start a replacement; idempotent."""
        with self._changed:
            if self._live.get(member.number) is not member:
                return
            del self._live[member.number]
            delay_s = self._restart_in(member.number, error, starting=False)
        member.end()
        if delay_s is not None and self._in_wait:
            self._put_off.append((member.number, delay_s))
        elif delay_s is not None:
            self.start([member.number], delay_s)
        self._notify()

    def stop_starts(self) -> None:
        """Prevent further starts and end current ones; idempotent. Raises RunStoppedError if a start does not end."""
        self._closed.set()
        with self._changed:
            threads = [*self._threads]  # all of these threads have begun
        for thread in threads:
            thread.join(_STARTS_END_WITHIN_S)
            if thread.is_alive():
                raise RunStoppedError(f"the {thread.name} did not end within {_STARTS_END_WITHIN_S:g} s")

    def shutdown(self) -> None:
        """End all members, including those that are starting; idempotent. Raises the errors of `stop_starts`."""
        self._closed.set()
        with self._changed:
            members, self._live = self.live, {}
            self._changed.notify_all()
        for member in members:
            member.end()
        self.stop_starts()

    def _restart_in(
        self, number: int, error: Exception, *, starting: bool, first: bool = False
    ) -> float | None:
        if self.failure is not None or self.closed:
            return None
        possible = self._lost() is None
        delay_s = self.budget.take(number, error, starting=starting, first=first) if possible else None
        if delay_s is None:
            self.failure = error
        else:
            self.restarts += 1
        return delay_s

    def _start(self, number: int, delay_s: float | None) -> None:
        """Start a member, and retry failures while the budget allows; a delay of None marks a first start."""
        while not self._closed.wait(delay_s or 0.0):
            try:
                member = self._build(number)
            except Exception as error:  # noqa: BLE001  # raised in `wait`, once no restart is left
                with self._changed:
                    delay_s = self._restart_in(number, error, starting=True, first=delay_s is None)
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
