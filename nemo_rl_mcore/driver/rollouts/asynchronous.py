"""Asynchronous rollouts: play groups one by one, ahead of training, while earlier steps train.

The training thread calls the public methods. A second thread runs an asyncio loop that plays the groups (the methods
under "The thread that plays"), and a third thread watches for stalls. A single condition guards the ledger.
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
from nemo_rl_mcore.driver import activity
from nemo_rl_mcore.driver.activity import LoopThread
from nemo_rl_mcore.driver.rollouts.events import Token
from nemo_rl_mcore.driver.rollouts.ledger import GroupState, StepState
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.driver.rollouts.scheduler import DrawnGroup, Scheduler
from nemo_rl_mcore.driver.rollouts.transcript import age_metrics, pace_metrics
from nemo_rl_mcore.driver.signals import current_stop_signals
from nemo_rl_mcore.engine.engine import EngineDiedError, EngineFailedError
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.rank.activity import stack_of

if TYPE_CHECKING:
    from nemo_rl_mcore.driver.actors.engine_generation import EngineGeneration

type Engines = EngineGeneration
"""Engines that run separately from the ranks."""

_LOOK_EVERY_S, _END_WITHIN_S = 1.0, 5.0
_GROUPS_SHOWN = 8


@dataclass(eq=False)
class AsynchronousScheduler(Scheduler[Engines]):
    """Plays groups on engines separate from the ranks, as soon as the ledger admits them; see `Scheduler`.

    section: settings of asynchronous rollouts. key: the section's path in a recipe, for messages.
    """

    section: AsyncRolloutsConfig = field(kw_only=True)
    key: str = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = self.ledger.limits
        self._limit = self.section.max_inflight_prompts or limits.groups_per_step * (limits.max_age + 1)
        self._error: BaseException | None = None
        self._failures = 0  # in a row
        self._refitting, self._halts = False, 0
        self._idle_since: float | None = None
        self._paused, self._ended = False, threading.Event()
        self._in_flight: dict[str, float] = {}  # start times by ticket
        self._moves = 0  # counts progress: answered groups, finished steps, and engine starts
        self._stall: RunStoppedError | None = None
        self._watchdog: threading.Thread | None = None
        self._thread = LoopThread("rollouts", self._wake_trainer)
        self.engine.changed = self._wake_trainer

    def update_weights(self, version: int) -> None:
        """Give the engines the policy's weights, and start to play every group that may be dispatched.

        Groups in flight continue with the new weights; without `in_flight_weight_updates`, they end before the update.
        """
        if self.ledger.step is StepState.COMMITTED and not self.section.in_flight_weight_updates:
            with self._changed:  # the next groups are played with the new weights
                self._paused = True
                self._wait(lambda: not self.ledger.count(GroupState.INFLIGHT), "groups in flight to end")
        # After an interrupted refit, engines wait for the next refit, possibly from new ranks.
        broke_off, self._refitting = self._refitting, True
        self.engine.update_weights(version)
        self._halts += broke_off
        self._refitting = False
        with self._changed:
            self._paused = False
            if self.ledger.step is StepState.COMMITTED:
                self.ledger.publish(self.engine.weights_digest)
                self._put_away(version)
            self._drawn.keep(self.ledger.reach)
            self._moves += 1  # the engines may have had to start
            if self.section.stall_timeout_s is not None and self._watchdog is None:
                watched = threading.current_thread(), self.section.stall_timeout_s
                watchdog = threading.Thread(target=self._watch, args=watched, name="stall watch", daemon=True)
                self._watchdog = watchdog
                watchdog.start()
        self._dispatch()

    def offload(self) -> None:
        """Do nothing: the engines have separate memory and continue to work."""

    def finish(self, trained: Sequence[Rollout]) -> dict[str, float]:
        ledger, batches = self.ledger, [rollout.batch for rollout in trained]
        with self._changed:
            self._count_idle()
            pace, metrics = self._pace, super().finish(trained)
            self._moves += 1
            pace.engine_restarts = self.engine.fleet.restarts
            pace.ready, pace.in_flight = ledger.count(GroupState.READY), ledger.count(GroupState.INFLIGHT)
        metrics |= age_metrics(batches, ledger.version - 1, ledger.limits.max_age)
        return metrics | pace_metrics(pace, time.monotonic())

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
                self._moves += 1
            self._dispatch()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up groups in flight and end the threads; raise RunStoppedError if a stall ended the block."""
        self._ended.set()
        if self._watchdog is not None:
            self._watchdog.join(_END_WITHIN_S)
        self._thread.close()
        super().__exit__(kind, error, trace)
        # Raise only if the stall itself, and no other signal, caused the interrupt.
        interrupted = isinstance(error, KeyboardInterrupt) and not current_stop_signals().arrived
        if self._stall is not None and interrupted:
            raise self._stall from error

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait on the condition until `ready` returns True, and count the time; signals interrupt the wait.

        Raises the error that ended the playing thread. The watchdog treats a wait without progress as a stall.
        """
        began_at, answered = time.monotonic(), 0
        with activity.at(lambda: f"waiting for {what}, {answered} ready"):
            while not ready():
                if self._error is not None:
                    raise self._error
                if self._drawn.keep(self.ledger.reach):
                    self._dispatch()  # to replace a dropped group
                answered = self.ledger.count(GroupState.READY)
                self._changed.wait()
        self._pace.trainer_idle_s += time.monotonic() - began_at

    def _dispatch(self) -> None:
        ledger = self.ledger
        with self._changed:
            while (
                not (self._paused or self._ended.is_set())
                and self._error is None
                and self.engine.answering
                and ledger.may_dispatch()
                and ledger.count(GroupState.INFLIGHT) < self._limit
                and ledger.next_position // ledger.limits.groups_per_step + 1 in self._drawn.steps
            ):
                token = ledger.dispatch()
                self._thread.begin(self._answer(token, self._drawn[token.position]))
            self._count_idle()

    # The thread that plays

    async def _answer(self, token: Token, group: DrawnGroup) -> None:
        ticket = f"group {token.position}, attempt {token.incarnation}.{token.attempt}"
        halts = self._halts

        async def respond(asked: BatchedDataDict) -> BatchedDataDict:
            async with asyncio.timeout(self.section.rollout_timeout_s):  # without environments' time
                return await self.engine.respond(asked, step=group.step, ticket=ticket)

        self._in_flight[ticket] = time.monotonic()
        try:
            batch = await self.draw.collector.play([group.prompt], group.asked, respond)
        except TimeoutError:
            if self._refitting or halts != self._halts:  # the engine was waiting for weights
                self._play_again(token, "timeout")
                return
            limit = f"{self.section.rollout_timeout_s:g} s ({self.key}.rollout_timeout_s)"
            late = RunStoppedError(f"{ticket}: not answered within {limit}", code="rollout-timeout")
            self._play_again(token, "timeout", late)
        except EngineDiedError as error:
            self._play_again(token, type(error).__name__)
        except Exception as error:  # noqa: BLE001  # the training thread raises it after too many failures
            ends = isinstance(error, RunStoppedError) and not isinstance(error, EngineFailedError)
            if ends:
                self._wake_trainer(error)  # before the group may be played again
            self._play_again(token, type(error).__name__, None if ends else error)
        else:
            with self._changed:
                self._commit(token, batch)
                self._failures = 0
                self._moves += 1
                self._changed.notify_all()
        finally:
            del self._in_flight[ticket]
            self._dispatch()

    def _wake_trainer(self, error: BaseException | None = None) -> None:
        """Wake the training thread if it is waiting; with an error, make its current or next wait raise it."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _play_again(self, token: Token, reason: str, failure: Exception | None = None) -> None:
        """Return a group to the queue, or drop it after too many failures of its own.

        failure: the error, which counts as a failure and ends the run after too many in a row; None if the engine died,
        waited for weights, or raised an error that ends the run anyway.
        """
        with self._changed:
            dropped = False
            if failure is None:
                self.ledger.requeue(token, reason)
            else:
                self._failures += 1
                before = self.ledger.count(GroupState.DROPPED)
                self.ledger.fail(token, reason)
                dropped = self.ledger.count(GroupState.DROPPED) > before
                if self._failures > (allowed := self.section.max_generation_failures):
                    failure.add_note(
                        f"{self.key}.max_generation_failures: {allowed} in a row are tried again"
                    )
                    self._error = self._error or failure
            (self._pace.dropped if dropped else self._pace.requeued)[reason] += 1
            self._changed.notify_all()

    def _count_idle(self) -> None:
        now = time.monotonic()
        if self._idle_since is not None:
            self._pace.engine_idle_s += now - self._idle_since
        self._idle_since = None if self.ledger.count(GroupState.INFLIGHT) else now

    # The thread that watches

    def _watch(self, trainer: threading.Thread, limit_s: float) -> None:
        """End the run if no group is answered and no step ends for `limit_s` seconds.

        The clock restarts whenever the training thread does something untimed (see `activity.at`), and it pauses while
        the whole process is suspended. The error reaches the training thread as an interrupt or in its next wait.
        """
        every_s, thread = min(_LOOK_EVERY_S, limit_s / 20), trainer.ident or 0
        seen, still_s = self._moves, 0.0
        while still_s < limit_s:
            if self._ended.wait(every_s):
                return
            if seen != self._moves or not activity.is_timed(thread):
                seen, still_s = self._moves, 0.0
            else:
                still_s += every_s  # not clock time, which includes suspensions of this process
        now, flights = time.monotonic(), [*self._in_flight.items()]
        engines = "no group is in flight: none may be asked for before a step ends, or no engine has weights"
        if flights:
            shown: list[str] = []
            for ticket, since in flights[:_GROUPS_SHOWN]:
                where = self.engine.fleet.whereabouts(ticket)
                shown.append(f"{ticket} ({now - since:.1f} s)" + (where and f" at {where}"))
            if len(flights) > len(shown):
                shown.append(f"and {len(flights) - len(shown)} more")
            engines = f"groups in flight: {', '.join(shown)}"
        message = [
            f"no group was answered and no step ended for {limit_s:g} s ({self.key}.stall_timeout_s)",
            f"training: {activity.describe(thread) or 'between two parts of a step'}",
            f"engines: {engines}",
            f"--- training, where it stood ---\n{stack_of(thread)}",
        ]
        self._stall = RunStoppedError("\n".join(message), code="stalled")
        of_signals = trainer is threading.main_thread() and current_stop_signals()
        if not (of_signals and of_signals.fail(self._stall)):
            self._wake_trainer(self._stall)
