"""Groups answered ahead of training, one by one, while earlier steps train: asynchronous rollouts.

There are two threads. The one that trains calls the public methods; groups are asked for in a second one, with an
asyncio loop (the methods under "The thread that asks"). The ledger belongs to both, and is read and changed
under one condition, on which the trainer waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from nemo_rl_mcore.config.algorithm import AsyncRolloutsConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.loop_thread import LoopThread
from nemo_rl_mcore.driver.rollouts.events import Token
from nemo_rl_mcore.driver.rollouts.ledger import GroupState, StepState
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.driver.rollouts.scheduler import DrawnGroup, Scheduler
from nemo_rl_mcore.driver.rollouts.transcript import Pace, age_metrics, pace_metrics
from nemo_rl_mcore.driver.signals import current_stop_signals
from nemo_rl_mcore.engine.engine import EngineDiedError, EngineFailedError
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.rank import activity

if TYPE_CHECKING:
    from nemo_rl_mcore.driver.actors.engine_generation import EngineGeneration

_LOOK_EVERY_S, _END_WITHIN_S = 1.0, 5.0
_GROUPS_SHOWN = 8

type Engines = EngineGeneration
"""Apart from the ranks."""


class StallWatch:
    """Watchdog thread: ends a run in which no group is answered and no step ends.

    Its clock stands still while the thread that trains is at something that is not timed, see `activity.at`, and while
    the whole process does.

    limit_s: seconds in which nothing moves; None watches nothing. key: of the recipe, that has it. whereabouts: says
    who answers a group, by its ticket. stop: has the thread that trains raise an error when it next waits; called where
    that thread listens to no signals, which reach it wherever it stands.
    """

    def __init__(
        self,
        limit_s: float | None,
        key: str,
        whereabouts: Callable[[str], str],
        stop: Callable[[BaseException], None],
    ) -> None:
        self._limit_s, self._key, self._whereabouts, self._stop = limit_s, key, whereabouts, stop
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.moves = 0
        """Groups that were answered and steps that ended, counted by one thread at a time."""
        self.in_flight: dict[str, float] = {}
        """Since when each group is asked for, by its ticket."""
        self.stall: RunStoppedError | None = None

    def start(self) -> None:
        self.moves += 1
        if self._limit_s is not None and self._thread is None:
            watched = threading.current_thread(), self._limit_s
            self._thread = threading.Thread(target=self._watch, args=watched, name="stall watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_END_WITHIN_S)

    def _watch(self, trainer: threading.Thread, limit_s: float) -> None:
        every_s, thread = min(_LOOK_EVERY_S, limit_s / 20), trainer.ident or 0
        seen, still_s = self.moves, 0.0
        while still_s < limit_s:
            if self._closed.wait(every_s):
                return
            if seen != self.moves or not activity.is_timed(thread):
                seen, still_s = self.moves, 0.0
            else:
                still_s += every_s  # as far as this process ran meanwhile
        now, flights = time.monotonic(), [*self.in_flight.items()]
        engines = "no group is in flight: none may be asked for before a step ends, or no engine has weights"
        if flights:
            shown: list[str] = []
            for ticket, since in flights[:_GROUPS_SHOWN]:
                where = self._whereabouts(ticket)
                shown.append(f"{ticket} ({now - since:.1f} s)" + (where and f" at {where}"))
            if len(flights) > len(shown):
                shown.append(f"and {len(flights) - len(shown)} more")
            engines = f"groups in flight: {', '.join(shown)}"
        message = [
            f"no group was answered and no step ended for {limit_s:g} s ({self._key})",
            f"training: {activity.describe(thread) or 'between two parts of a step'}",
            f"engines: {engines}",
            f"--- training, where it stood ---\n{activity.stack_of(thread)}",
        ]
        self.stall = RunStoppedError("\n".join(message), code="stalled")
        of_signals = trainer is threading.main_thread() and current_stop_signals()
        if not (of_signals and of_signals.fail(self.stall)):
            self._stop(self.stall)


@dataclass(eq=False)
class AsynchronousScheduler(Scheduler[Engines]):
    """Asks engines apart from the ranks for groups as soon as the ledger admits them; see `Scheduler`.

    section: the keys of asynchronous rollouts. key: their path in a recipe, for messages.
    """

    section: AsyncRolloutsConfig = field(kw_only=True)
    key: str = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        section, limits = self.section, self.ledger.limits
        self._limit = section.max_inflight_prompts or limits.groups_per_step * (limits.max_age + 1)
        self._error: BaseException | None = None
        self._failures = 0  # in a row
        self._refitting, self._halts = False, 0
        self._idle_since: float | None = None
        key = f"{self.key}.stall_timeout_s"
        self._watch = StallWatch(section.stall_timeout_s, key, self.engine.whereabouts, self._wake_trainer)
        self._paused = self._ended = False
        self._thread = LoopThread("rollouts", self._wake_trainer)
        self.engine.listen(self._wake_trainer)

    def update_weights(self, version: int) -> None:
        """Give the engines the policy's weights; groups in flight go on with them, unless they are to end before.

        The first call begins to answer groups. One with weights that the engines hold waits for nothing.
        """
        if self.ledger.step is StepState.COMMITTED and not self.section.in_flight_weight_updates:
            with self._changed:  # the next groups are asked for with the new weights
                self._paused = True
                self._wait(lambda: not self.ledger.count(GroupState.INFLIGHT), "groups in flight to end")
        # One that breaks off leaves the engines waiting for the next, maybe of new ranks.
        broke_off, self._refitting = self._refitting, True
        self.engine.update_weights(version)
        self._halts += broke_off
        self._refitting = False
        with self._changed:
            self._paused = False
            if self.ledger.step is StepState.COMMITTED:
                self.ledger.publish(self.engine.weights_digest)
                self._put_away(version)
            self._draw_ahead()
            self._watch.start()  # engines may have had to start
        self._dispatch()

    def offload(self) -> None:
        """Leave the engines at work: they have separate memory."""

    def finish(self) -> Pace:
        with self._changed:
            self._count_idle()
            pace = super().finish()
            self._watch.moves += 1
            pace.engine_restarts = self.engine.restarts
            pace.ready = self.ledger.count(GroupState.READY)
            pace.in_flight = self.ledger.count(GroupState.INFLIGHT)
            return pace

    def report(self, pace: Pace, trained: Sequence[Rollout]) -> dict[str, float]:
        batches = [rollout.batch for rollout in trained]
        ages = age_metrics(batches, self.ledger.version - 1, self.ledger.limits.max_age)
        return super().report(pace, trained) | ages | pace_metrics(pace, time.monotonic())

    def _wait_for_ready(self, groups: int) -> None:
        while True:
            with self._changed:
                self._wait(
                    lambda: len(self.ledger.leasable()) >= groups or self.engine.joining, "groups to train on"
                )
                if len(self.ledger.leasable()) >= groups:
                    return
            self.engine.rejoin()  # the open step has not changed the published weights yet
            with self._changed:
                self._watch.moves += 1
            self._dispatch()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up what is in flight, end the threads; raises the RunStoppedError of a stall that ended the block."""
        self._watch.close()
        with self._changed:
            self._ended = True
        self._thread.close()
        super().__exit__(kind, error, trace)
        stall = self._watch.stall
        # The interrupt that the stall came by, and no other signal.
        if stall is not None and isinstance(error, KeyboardInterrupt) and not current_stop_signals().asked:
            raise stall from error

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait, with the condition, until something is so, and count the time; a signal is heard meanwhile.

        Raises what ended the thread that asks. A wait that does not end is a stall, which the watch reports.
        """
        began_at, answered = time.monotonic(), 0
        with activity.at(lambda: f"waiting for {what}, {answered} ready"):
            while not ready():
                if self._error is not None:
                    raise self._error
                if self._draw_ahead():  # a group was dropped, and the next one takes its place
                    self._dispatch()
                answered = self.ledger.count(GroupState.READY)
                self._changed.wait()
        self._pace.trainer_idle_s += time.monotonic() - began_at

    def _dispatch(self) -> None:
        ledger = self.ledger
        with self._changed:
            while (
                not (self._paused or self._ended)
                and self._error is None
                and self.engine.answering
                and ledger.may_dispatch()
                and ledger.count(GroupState.INFLIGHT) < self._limit
                and ledger.next_position // ledger.limits.groups_per_step + 1 in self._drawn.steps
            ):
                token = ledger.dispatch()
                self._thread.begin(self._answer(token, self._drawn[token.position]))
            self._count_idle()

    # The thread that asks

    async def _answer(self, token: Token, group: DrawnGroup) -> None:
        ticket = f"group {token.position}, attempt {token.incarnation}.{token.attempt}"
        halts = self._halts

        async def respond(asked: BatchedDataDict) -> BatchedDataDict:
            async with asyncio.timeout(self.section.rollout_timeout_s):  # environments have their own
                return await self.engine.respond(asked, step=group.step, ticket=ticket)

        self._watch.in_flight[ticket] = time.monotonic()
        try:
            batch = await self.draw.collector.play([group.prompt], group.asked, respond)
        except TimeoutError:
            if self._refitting or halts != self._halts:  # its engine could not answer
                self._cancel(token, "timeout")
                return
            limit = f"{self.section.rollout_timeout_s:g} s ({self.key}.rollout_timeout_s)"
            late = RunStoppedError(f"{ticket}: not answered within {limit}", code="rollout-timeout")
            self._fail(token, "timeout", late)
        except EngineDiedError as error:
            self._cancel(token, type(error).__name__)
        except Exception as error:  # noqa: BLE001  # raised by the thread that trains, once it is one too many
            if isinstance(error, RunStoppedError) and not isinstance(error, EngineFailedError):
                self._wake_trainer(error)  # before the group may be asked again
                self._cancel(token, type(error).__name__)
            else:
                self._fail(token, type(error).__name__, error)
        else:
            with self._changed:
                self._commit(token, batch)
                self._failures = 0
                self._watch.moves += 1
                self._changed.notify_all()
        finally:
            del self._watch.in_flight[ticket]
            self._dispatch()

    def _wake_trainer(self, error: BaseException | None = None) -> None:
        """Have the thread that trains look again, or raise this when it next waits."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _cancel(self, token: Token, reason: str) -> None:
        """Have the group answered again, which does not count against it: its engine is gone, or waits for weights."""
        with self._changed:
            self.ledger.requeue(token, reason)
            self._pace.requeued[reason] += 1
            self._changed.notify_all()

    def _fail(self, token: Token, reason: str, error: Exception) -> None:
        """Have the group answered again, or end the run when that has been tried too often in a row."""
        with self._changed:
            self._failures += 1
            before = self.ledger.count(GroupState.DROPPED)
            self.ledger.fail(token, reason)
            dropped = self.ledger.count(GroupState.DROPPED) > before
            (self._pace.dropped if dropped else self._pace.requeued)[reason] += 1
            if self._failures > (allowed := self.section.max_generation_failures):
                error.add_note(f"{self.key}.max_generation_failures: {allowed} in a row are tried again")
                self._error = self._error or error
            self._changed.notify_all()

    def _count_idle(self) -> None:
        now = time.monotonic()
        if self._idle_since is not None:
            self._pace.engine_idle_s += now - self._idle_since
        self._idle_since = None if self.ledger.count(GroupState.INFLIGHT) else now
