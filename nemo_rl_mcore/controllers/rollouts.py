"""Groups answered ahead of training: the side of an asynchronous run that never waits for the optimizer.

The thread that trains calls `Rollouts`; groups are asked for in a second thread, with an asyncio loop of its own. The
ledger belongs to both, and is read and changed under one condition, on which the trainer waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from nemo_rl_mcore import activity
from nemo_rl_mcore.algorithms.episodes import sampled_versions
from nemo_rl_mcore.config.asynchronous import AsyncGRPOConfig
from nemo_rl_mcore.controllers.draw import Draw, DrawnGroup, DrawnGroups
from nemo_rl_mcore.controllers.event_log import LogMark
from nemo_rl_mcore.controllers.events import Segment, Token
from nemo_rl_mcore.controllers.group_store import GroupStore, Retention, digest_of_group, segments_of
from nemo_rl_mcore.controllers.ledger import Ledger
from nemo_rl_mcore.controllers.logged_turns import turns_of
from nemo_rl_mcore.controllers.metrics import Pace
from nemo_rl_mcore.controllers.saved_ledger import SavedLedger
from nemo_rl_mcore.controllers.saved_rollouts import SavedRollouts
from nemo_rl_mcore.controllers.stall_watch import StallWatch
from nemo_rl_mcore.controllers.states import GroupState, StepState
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.errors import RunStoppedError, folder_error
from nemo_rl_mcore.generation.engine import EngineDiedError, EngineFailedError
from nemo_rl_mcore.interfaces import RolloutEngines
from nemo_rl_mcore.loop_thread import LoopThread

_SECTION = "grpo.async_grpo"


class Rollouts:
    """Implements `interfaces.GenerationInterface` for the training loop, whose updates of the weights it publishes.

    A context manager: the thread ends with it, and what is in flight is given up.
    """

    def __init__(
        self,
        section: AsyncGRPOConfig,
        ledger: Ledger,
        groups: GroupStore,
        engines: RolloutEngines,
        draw: Draw,
        retention: Retention,
    ) -> None:
        self.ledger, self.groups = ledger, groups
        self._section, self._engines, self._draw = section, engines, draw
        self._drawn = DrawnGroups(draw, ledger.limits.groups_per_step)
        self._limit = section.max_inflight_prompts or ledger.limits.groups_per_step * (
            ledger.limits.max_age + 1
        )
        self._retention = retention
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._failures = 0  # in a row
        self._refitting, self._halts = False, 0
        self._pace = Pace()
        self._idle_since: float | None = None
        self._watch = StallWatch(
            section.stall_timeout_s, f"{_SECTION}.stall_timeout_s", engines.whereabouts, self._stop_trainer
        )
        self._paused = self._ended = False
        self._thread = LoopThread("rollouts", self._stop_trainer)
        engines.listen(self._engines_changed)

    # What the training loop asks of its engine

    def update_weights(self, version: int) -> None:
        """Give the engines the policy's weights; groups in flight go on with them, unless they are to end before.

        The first call begins to answer groups. One with weights that the engines hold waits for nothing.
        """
        if self.ledger.step is StepState.COMMITTED and not self._section.in_flight_weight_updates:
            self._drain()
        self._refit(version)
        with self._changed:
            self._paused = False
            if self.ledger.step is StepState.COMMITTED:
                self.ledger.publish(self._engines.weights_digest)
                self._put_away(version)
            self._draw_ahead()
            self._watch.start()  # engines may have had to start
        self._dispatch()

    def _refit(self, version: int) -> None:
        """Give the engines the weights; one that breaks off leaves them waiting for the next, maybe of new ranks."""
        broke_off, self._refitting = self._refitting, True
        self._engines.update_weights(version)
        self._halts += broke_off
        self._refitting = False

    def generate(self, data: BatchedDataDict, *, step: int, greedy: bool = False) -> BatchedDataDict:
        """Answer prompts beside the groups; the weights do not change meanwhile."""
        return self._engines.generate(data, step=step, greedy=greedy)

    def offload(self) -> None:
        """Nothing to do: the engines have memory of their own."""

    # What the train step asks

    def begin(self) -> int:
        """Open the ledger's next step; returns its number."""
        with self._changed:
            return self.ledger.begin()

    def chunks(self, at_least: int) -> Iterator[Sequence[int]]:
        """The positions of the open step's groups, as soon as so many more are answered, until it is full."""
        while room := self.ledger.room():
            wanted = min(at_least, room)
            with activity.at(f"taking {wanted} groups at least"):
                positions = self._lease(wanted)
            yield positions

    def _lease(self, at_least: int) -> list[int]:
        while True:
            with self._changed:
                self._wait(lambda: self._are_ready(at_least) or self._engines.joining, "groups to train on")
                if self._are_ready(at_least):
                    positions = self.ledger.leasable()
                    self.ledger.lease(positions)
                    return positions
            self._rejoin()

    def _are_ready(self, groups: int) -> bool:
        return len(self.ledger.leasable()) >= groups

    def _rejoin(self) -> None:
        """Have engines that started anew answer; the open step has not changed the published weights yet."""
        self._engines.rejoin()
        with self._changed:
            self._watch.moved()
        self._dispatch()

    def chunks_of(self, step: int) -> Sequence[Sequence[int]]:
        """The positions of each chunk that a finished step was trained on; LedgerError once it is forgotten."""
        with self._changed:
            return self.ledger.chunks_of(step)

    def prompt_of(self, position: int) -> Prompt:
        """The prompt of a group."""
        with self._changed:
            return self._drawn[position].prompt

    def finishing(self) -> None:
        """Take note that the optimizer is about to step."""
        with self._changed:
            self.ledger.finishing()

    def finish(self) -> Pace:
        """Take note that it has; returns what happened since the last step."""
        with self._changed:
            self.ledger.finish()
            self._watch.moved()
            self._count_idle()
            pace, self._pace = self._pace, Pace()
            pace.engine_restarts = self._engines.restarts
            pace.ready = self.ledger.count(GroupState.READY)
            pace.in_flight = self.ledger.count(GroupState.INFLIGHT)
            return pace

    def checkpointed(self, step: int) -> None:
        """Take note that the checkpoint of a step is whole: what was trained up to it is not needed any more."""
        with self._changed:
            self.ledger.checkpointed(step)
            self._forget(step)

    def saved(self, mark_log: Callable[[], LogMark]) -> SavedRollouts:
        """What a checkpoint between two steps is to hold, as it is now; groups are answered meanwhile."""
        with self._changed:
            ledger = SavedLedger.model_validate(self.ledger.to_json())
            ready = {position: self.groups.get(position) for position in ledger.ready}
            return SavedRollouts(ledger, mark_log(), ready)

    def _put_away(self, step: int) -> None:
        """Write the groups of a finished step down, and forget them, as far as that is asked for; raises FolderError.

        Not when it is finished: only what is recorded outlives a folder that cannot be written to.
        """
        if (root := self._retention.archive) is not None:
            positions = [position for chunk in self.ledger.chunks_of(step) for position in chunk]
            try:
                self.groups.save(root / f"step_{step}", positions)
            except OSError as error:
                raise folder_error("logger.log_dir", root, error) from error
        if not self._retention.until_checkpoint:
            self._forget(step)

    def _forget(self, step: int) -> None:
        self.ledger.forget(step)
        self.groups.forget_all_but(self.ledger.retained(step))

    def give_up(self, reason: str) -> None:
        """Take note that the open step leaves no trace; its groups can be trained again."""
        with self._changed:
            match self.ledger.step:
                case StepState.OPEN:
                    self.ledger.abort(reason)
                case StepState.FINISHING:
                    self.ledger.lost(reason)
                case StepState.IDLE | StepState.COMMITTED:
                    pass

    def __enter__(self) -> Self:
        """Return the rollouts."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up what is in flight, end the threads, and put away a step whose weights no engine was given any more.

        Raises the RunStoppedError of a stall by which the block has ended.
        """
        self._watch.close()
        with self._changed:
            self._ended = True
        self._thread.close()
        if self.ledger.step is StepState.COMMITTED:
            self._put_away(self.ledger.version)
        self._watch.raise_in_place_of(error)

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait, with the condition, until something is so, and count the time; a signal is heard meanwhile.

        Raises what ended the thread that asks. A wait that does not end is a stall, which the watch tells.
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

    def _drain(self) -> None:
        """Wait until no group is in flight; the next ones are asked for with the new weights."""
        with self._changed:
            self._paused = True
            self._wait(lambda: not self.ledger.count(GroupState.INFLIGHT), "groups in flight to end")

    def _draw_ahead(self) -> bool:
        """Draw the prompts of all steps that may be asked for now, and forget those behind; says whether any was new.

        A dropped group's place is taken by the next one, at last by one behind the last step.
        """
        limits, ledger = self.ledger.limits, self.ledger
        behind = -(-len(ledger.dropped) // limits.groups_per_step)
        steps = min(ledger.published + limits.max_age + 1, limits.last_step) + behind
        return self._drawn.keep(range(ledger.version + 1, steps + 1))

    def _dispatch(self) -> None:
        """Ask for all groups that the ledger admits; called by whichever thread has made room."""
        with self._changed:
            while self._may_dispatch():
                token = self.ledger.dispatch()
                self._thread.begin(self._answer(token, self._drawn[token.position]))
            self._count_idle()

    def _may_dispatch(self) -> bool:
        ledger = self.ledger
        return (
            not (self._paused or self._ended)
            and self._error is None
            and self._engines.answering
            and ledger.may_dispatch()
            and ledger.count(GroupState.INFLIGHT) < self._limit
            and ledger.next_position in self._drawn
        )

    # The thread that asks

    async def _answer(self, token: Token, group: DrawnGroup) -> None:
        ticket = f"group {token.position}, attempt {token.incarnation}.{token.attempt}"
        halts = self._halts
        try:
            with self._watch.asking(ticket):
                batch = await self._draw.play(group, partial(self._respond, group.step, ticket))
        except TimeoutError:
            if self._refitting or halts != self._halts:  # its engine could not answer
                self._cancel(token, "timeout")
                return
            limit = f"{self._section.rollout_timeout_s:g} s ({_SECTION}.rollout_timeout_s)"
            self._fail(
                token,
                "timeout",
                RunStoppedError(f"{ticket}: not answered within {limit}", code="rollout-timeout"),
            )
        except EngineDiedError as error:
            self._cancel(token, type(error).__name__)
        except Exception as error:  # noqa: BLE001  # raised by the thread that trains, once it is one too many
            if isinstance(error, RunStoppedError) and not isinstance(error, EngineFailedError):
                self._stop_trainer(error)  # before the group may be asked again
                self._cancel(token, type(error).__name__)
            else:
                self._fail(token, type(error).__name__, error)
        else:
            self._commit(token, batch, segments_of(sampled_versions(batch)))
        finally:
            self._dispatch()

    async def _respond(self, step: int, ticket: str, asked: BatchedDataDict) -> BatchedDataDict:
        """The answers of a turn, in time; environments have a deadline of their own."""
        async with asyncio.timeout(self._section.rollout_timeout_s):
            return await self._engines.respond(asked, step=step, ticket=ticket)

    def _engines_changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _stop_trainer(self, error: BaseException) -> None:
        """Have the thread that trains raise this when it next waits."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _commit(self, token: Token, batch: BatchedDataDict, segments: Sequence[Segment]) -> None:
        with self._changed:
            if self.ledger.commit(token, segments, digest_of_group(batch), turns_of(batch)):
                self.groups.put(token.position, batch)
            self._failures = 0
            self._watch.moved()
            self._changed.notify_all()

    def _cancel(self, token: Token, reason: str) -> None:
        """Have the group answered again, which does not count against it: its engine is gone, or waits for weights."""
        with self._changed:
            self.ledger.cancel(token, reason)
            self._pace.requeued[reason] += 1
            self._changed.notify_all()

    def _fail(self, token: Token, reason: str, error: Exception) -> None:
        """Have the group answered again, or end the run when that has been tried too often in a row."""
        with self._changed:
            self._failures += 1
            before = len(self.ledger.dropped)
            self.ledger.fail(token, reason)
            dropped = len(self.ledger.dropped) > before
            (self._pace.dropped if dropped else self._pace.requeued)[reason] += 1
            if self._failures > (allowed := self._section.max_generation_failures):
                error.add_note(f"{_SECTION}.max_generation_failures: {allowed} in a row are tried again")
                self._error = self._error or error
            self._changed.notify_all()

    def _count_idle(self) -> None:
        """Add the time in which nothing was in flight."""
        now = time.monotonic()
        if self._idle_since is not None:
            self._pace.engine_idle_s += now - self._idle_since
        self._idle_since = None if self.ledger.count(GroupState.INFLIGHT) else now
