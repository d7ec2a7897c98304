"""Track the state of a run's prompt groups. The ledger has no lock: callers hold the scheduler's.

By default, groups are trained in the order in which their prompts were drawn, n per step. They are dispatched while

    live + trained < (max_age + published + 1) * n.

A group that is trained at version `rank // n` was therefore dispatched when version `rank // n - max_age` or a later
one was published, so no group becomes too old to be trained. The formula uses `published` rather than `version`
because engines keep answering with the old weights between a step's end and its publication. A group's rank is its
place among the groups that have not been dropped, so a drop lowers the rank and age of every later group. In other
orders, the formula ensures that enough steps are left to train every group in time.

An order is a pure function of the ledger's groups. To add an order, write a class and list it in `ORDERS`. `taken`
receives all groups that are neither leased nor done, in draw order, and returns the READY groups that the open step
may take now, at most `room.groups`. It must not take a group that is too old, or leave one that would be more than
`max_age` versions old when a later step trains it. If no attempt is under way, it must take all READY groups that fit,
or the step would wait forever. `fits` returns True if all READY groups of a saved run can be trained in time; its
`room` belongs to a step that has not taken any groups.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError

from nemo_rl_mcore.driver.rollouts import events
from nemo_rl_mcore.driver.rollouts.events import Count, Event, Exactly, Segment, Token
from nemo_rl_mcore.errors import CodedError, RefusedError


class GroupState(Enum):
    """A group is live while INFLIGHT, READY or LEASED; TRAINED and DROPPED (unanswerable or unused) are final."""

    PENDING = "pending"
    INFLIGHT = "inflight"
    READY = "ready"
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"


class StepState(Enum):
    """A train step goes from IDLE to OPEN, FINISHING, COMMITTED and, once its weights are published, IDLE again."""

    IDLE = "idle"
    OPEN = "open"
    FINISHING = "finishing"
    COMMITTED = "committed"


class LedgerError(CodedError, RuntimeError):
    """The state is impossible or does not allow an event, because of a bug in the controller or an engine."""


@dataclass(frozen=True)
class Limits:
    """A run's limits.

    max_age: versions that a group may be behind when it is trained. max_attempts: failures that drop a group. spare:
    extra groups from which dynamic sampling may choose. order: a name in `ORDERS`. groups_key, age_key: recipe keys of
    groups_per_step and max_age, for messages.
    """

    groups_per_step: int
    max_age: int
    last_step: int
    max_attempts: int
    spare: int = 0
    order: str = "in_order"
    groups_key: str = "num_prompts_per_step"
    age_key: str = "max_trajectory_age_steps"

    def __post_init__(self) -> None:
        lowest = {"groups_per_step": 1, "max_age": 0, "last_step": 0, "max_attempts": 1, "spare": 0}
        for name, least in lowest.items():
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclass
class Group:
    """A group that is neither trained nor dropped. min_version: a lower bound on its tokens' weight versions."""

    position: int
    attempt: int = 0
    failures: int = 0
    min_version: int = 0
    state: GroupState = GroupState.PENDING


@dataclass(frozen=True)
class Room:
    """The number of groups that the open step can still take. version: the version of the weights that it trains."""

    groups: int
    groups_per_step: int
    version: int
    max_age: int

    def steps_left(self, group: Group) -> int:
        """Return the number of steps that a group can still wait; negative if the group is already too old."""
        return group.min_version + self.max_age - self.version


class InOrder:
    """Takes groups in draw order; the step waits for each group.

    The recipe alone determines which groups a step trains on. The dispatch condition keeps groups from getting too old.
    """

    def taken(self, groups: Sequence[Group], room: Room) -> list[Group]:
        return [group for group in groups[: room.groups] if group.state is GroupState.READY]

    def fits(self, groups: Sequence[Group], room: Room) -> bool:
        for rank, group in enumerate(groups):
            # The number of steps from the open one to the one that trains this group.
            ahead = max(0, 1 + (rank - room.groups) // room.groups_per_step)
            if group.state is GroupState.READY and ahead > room.steps_left(group):
                return False
        return True


class AsCompleted:
    """Takes answered groups, the most urgent first; the step waits for groups that have reached `max_age`.

    A group must be trained at version `min_version + max_age` at the latest. A choice is safe if, for every later
    version, the steps up to it have room for all groups that must be trained by then (Hall's condition for unit jobs).
    Taking groups at `max_age` first is not enough if `max_age` is above 1, because several could reach it together.
    """

    def taken(self, groups: Sequence[Group], room: Room) -> list[Group]:
        free, chosen = self._free_places(groups, room), list[Group]()
        ready = (group for group in groups if group.state is GroupState.READY)
        for group in sorted(ready, key=lambda one: (one.min_version, one.position)):
            # In these steps, the group takes a place that a more urgent group may need.
            steps = range(room.steps_left(group))
            if len(chosen) == room.groups or any(free[ahead] < 1 for ahead in steps):
                break  # later groups can wait at least as long, so they would not fit either
            for ahead in steps:
                free[ahead] -= 1
            chosen.append(group)
        return chosen

    def fits(self, groups: Sequence[Group], room: Room) -> bool:
        ready = [group for group in groups if group.state is GroupState.READY]
        in_time = all(room.steps_left(group) >= 0 for group in ready)
        return in_time and min(self._free_places(ready, room)) >= 0

    def _free_places(self, groups: Sequence[Group], room: Room) -> list[int]:
        """Return, for each number of steps ahead from 0 to max_age, the unreserved places in all steps up to then."""
        due = Counter(room.steps_left(group) for group in groups if group.state is not GroupState.PENDING)
        free, left = list[int](), room.groups
        for ahead in range(room.max_age + 1):
            left -= due[ahead]
            free.append(left)
            left += room.groups_per_step
        return free


ORDERS: Mapping[str, InOrder | AsCompleted] = MappingProxyType(
    {"in_order": InOrder(), "as_completed": AsCompleted()}
)
"""Orders by the value of the key `order` of asynchronous rollouts."""


class SavedGroup(Exactly):
    """A group that is neither trained nor dropped. min_version: None for a group that is not ready."""

    position: Count
    attempt: Count
    failures: Count
    min_version: Count | None

    def as_group(self) -> Group:
        group = Group(self.position, self.attempt, self.failures)
        if self.min_version is not None:
            group.state, group.min_version = GroupState.READY, self.min_version
        return group


class SavedLedger(Exactly):
    """A ledger between two steps. groups: sorted by position. dropped: numbers of dropped groups, by reason."""

    groups_per_step: Annotated[int, Field(ge=1)]
    incarnation: Count
    version: Count
    cursor: Count
    dropped: dict[Annotated[str, Field(min_length=1)], Count]
    groups: list[SavedGroup]

    @property
    def ready(self) -> list[int]:
        return [group.position for group in self.groups if group.min_version is not None]

    @classmethod
    def parse(cls, saved: object, limits: Limits) -> Self:
        """Read the result of `model_dump` for a run with these limits; raise ValueError, naming the fault."""
        try:
            ledger = cls.model_validate(saved)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "it"
            what = f"the saved ledger is broken: {place}: {first['msg']}"
            raise RefusedError(what, code="ledger-fields") from error
        groups, groups_per_step, max_age = ledger.groups, limits.groups_per_step, limits.max_age
        positions = [group.position for group in groups]
        done = ledger.version * ledger.groups_per_step + sum(ledger.dropped.values())
        broken, code = "", ""
        if any(later <= earlier for earlier, later in pairwise([*positions, ledger.cursor])):
            broken, code = "its groups are not in order, or not before the cursor", "ledger-order"
        elif done + len(positions) != ledger.cursor:
            broken, code = "positions before the cursor are missing", "ledger-positions"
        elif any((group.min_version or 0) > ledger.version for group in groups):
            broken, code = "a group is newer than the weights", "ledger-versions"
        if broken:
            raise RefusedError(f"the saved ledger is broken: {broken}", code=code)
        if groups_per_step != ledger.groups_per_step:
            raise RefusedError(
                f"{limits.groups_key} is {groups_per_step}, and the saved run had {ledger.groups_per_step}: "
                "which prompts are left would not be known; set it back",
                code="groups-per-step",
            )
        # Spare groups that the step does not take are put away at its end.
        room = Room(groups_per_step + limits.spare, groups_per_step, ledger.version, max_age)
        if not ORDERS[limits.order].fits([group.as_group() for group in groups], room):
            raise RefusedError(
                f"{limits.age_key} is {max_age} and the order {limits.order}, and the saved run has groups ready that "
                "will be older when they are trained; set both back",
                code="trajectory-age",
            )
        return ledger


class Ledger:
    """Keeps the state of every group and of the train step.

    Each event is passed to `log`, in order, before the state changes; if `log` raises, the state stays as it was. A
    call that the state does not allow raises LedgerError and changes nothing. Only groups that are still needed are
    kept, so a call costs the same at any step of a long run.

    version: version of the weights at the start; all groups of the steps up to it are trained. incarnation: number of
    times that the driver has been resumed; attempts of an earlier incarnation are void.
    """

    def __init__(
        self, limits: Limits, log: Callable[[Event], None], *, version: int = 0, incarnation: int = 0
    ) -> None:
        self.limits = limits
        self.incarnation = incarnation
        self.version = version
        """Number of finished steps."""
        self.step = StepState.IDLE
        self.cursor = version * limits.groups_per_step
        """The next position that has never been dispatched."""
        self.dropped = Counter[str]()
        """Numbers of groups that have been dropped or not used, by reason."""
        self._order = ORDERS[limits.order]
        self._log = log
        self._groups: dict[int, Group] = {}  # by position, in ascending order
        self._pending: list[int] = []  # a heap
        self._chunks: list[tuple[int, ...]] = []
        self._steps: dict[int, tuple[tuple[int, ...], ...]] = {}  # chunks of steps that may have to be redone
        self._forgotten = version
        log(events.Started(incarnation=incarnation, version=version))

    @property
    def published(self) -> int:
        """The weight version that engines hold: `version`, or `version - 1` while the step is COMMITTED."""
        return self.version - (self.step is StepState.COMMITTED)

    @property
    def live(self) -> int:
        return len(self._groups) - len(self._pending)

    @property
    def trained(self) -> int:
        return self.version * self.limits.groups_per_step

    def count(self, state: GroupState) -> int:
        match state:
            case GroupState.TRAINED:
                return self.trained
            case GroupState.DROPPED:
                return self.dropped.total()
            case _:
                return sum(group.state is state for group in self._groups.values())

    # Rollouts

    def may_dispatch(self) -> bool:
        return self.live + self.trained < self._admitted

    @property
    def reach(self) -> range:
        """The positions from the first unfinished group to the last one that may be dispatched before the step ends."""
        more = max(0, self._admitted - self.trained - len(self._groups))
        return range(next(iter(self._groups), self.cursor), self.cursor + more)

    @property
    def next_position(self) -> int:
        return self._pending[0] if self._pending else self.cursor

    def dispatch(self) -> Token:
        """Begin an attempt at the first group that needs one; raise LedgerError unless `may_dispatch`."""
        if not self.may_dispatch():
            states = ", ".join(
                f"{self.count(state)} {state.value}" for state in GroupState if self.count(state)
            )
            raise LedgerError(
                f"no group may be dispatched: version {self.version}, published {self.published}, step "
                f"{self.step.value}, cursor {self.cursor}, {self.dropped.total()} dropped, groups: {states or 'none'}",
                code="not-admitted",
            )
        position = self.next_position
        group = self._groups.get(position) or Group(position)
        token = Token(self.incarnation, position, group.attempt + 1)
        self._log(events.Dispatched(token=token, version=self.published))
        if self._pending:
            heapq.heappop(self._pending)
        else:
            self._groups[position] = group
            self.cursor += 1
        group.attempt, group.min_version, group.state = token.attempt, self.published, GroupState.INFLIGHT
        return token

    def commit(self, token: Token, segments: Sequence[Segment], digest: str = "") -> bool:
        """Mark a generated group as READY; do nothing and return False if the attempt is no longer under way.

        Raises LedgerError, because the engine is broken, if tokens are older than the version published at the dispatch
        or newer than the trainer's version, or if the segments do not begin at 0 in ascending order.
        """
        group = self._under_way(token)
        if group is None:
            return False
        firsts, versions = [one.first for one in segments], [one.version for one in segments]
        if not firsts or firsts[0] != 0 or sorted(set(firsts)) != firsts:
            raise LedgerError(f"{token}: segments begin at {firsts}; they must begin at 0 and go upwards")
        if min(versions) < group.min_version or max(versions) > self.version:
            raise LedgerError(
                f"{token}: an engine answered with versions {versions}; the group was dispatched at version "
                f"{group.min_version}, and the newest is {self.version}",
                code="token-versions",
            )
        self._log(events.Committed(token=token, segments=tuple(segments), digest=digest))
        group.state, group.min_version = GroupState.READY, min(versions)
        return True

    def fail(self, token: Token, reason: str) -> bool:
        """Count a failed attempt; the group is generated again, or DROPPED after `max_attempts` failures.

        Does nothing and returns False if the attempt is no longer under way.
        """
        group = self._under_way(token)
        if group is None:
            return False
        dropped = group.failures + 1 >= self.limits.max_attempts
        self._log(events.Failed(token=token, reason=reason, dropped=dropped))
        group.failures += 1
        if dropped:
            del self._groups[group.position]
            self.dropped[reason] += 1
        else:
            group.state = GroupState.PENDING
            heapq.heappush(self._pending, group.position)
        return True

    def requeue(self, token: Token, reason: str) -> bool:
        """Schedule the group to be played again from its first turn, without counting a failure.

        Does nothing and returns False if the attempt is no longer under way.
        """
        group = self._under_way(token)
        if group is None:
            return False
        self._log(events.Cancelled(token=token, reason=reason))
        group.state = GroupState.PENDING
        heapq.heappush(self._pending, group.position)
        return True

    def unused(self, position: int, reason: str) -> None:
        group = self._groups.get(position)
        if group is None or group.state is not GroupState.READY:
            raise LedgerError(f"group {position} is not ready", code="group-state")
        self._log(events.Unused(position=position, reason=reason))
        del self._groups[position]
        self.dropped[reason] += 1

    # The train step

    def begin(self) -> int:
        """Open the next step and return its number; raise LedgerError unless IDLE, or after the last step."""
        self._require(StepState.IDLE)
        if self.version >= self.limits.last_step:
            raise LedgerError(f"step {self.version} was the last one")
        step = self.version + 1
        self._log(events.Begun(step=step))
        self.step = StepState.OPEN
        return step

    def room(self) -> int:
        """Return the number of groups that the open step can still take; 0 if no step is open."""
        if self.step is not StepState.OPEN:
            return 0
        return self.limits.groups_per_step - sum(len(chunk) for chunk in self._chunks)

    def leasable(self) -> list[int]:
        """Return the positions of the READY groups that the open step may take now, according to `Limits.order`."""
        others = [group for group in self._groups.values() if group.state is not GroupState.LEASED]
        room = Room(self.room(), self.limits.groups_per_step, self.version, self.limits.max_age)
        return [group.position for group in self._order.taken(others, room)]

    def lease(self, positions: Sequence[int]) -> None:
        """Give these groups to the open step as its next chunk; raise LedgerError if any of them is not leasable."""
        self._require(StepState.OPEN)
        if not positions or len({*positions}) < len(positions) or not {*positions} <= {*self.leasable()}:
            raise LedgerError(
                f"groups {[*positions]} are no chunk; leasable are {self.leasable()}", code="not-leasable"
            )
        self._log(events.Leased(step=self.version + 1, positions=tuple(positions)))
        for position in positions:
            self._groups[position].state = GroupState.LEASED
        self._chunks.append(tuple(positions))

    def finishing(self) -> None:
        """Record that the optimizer is about to step; raise LedgerError unless the step is full."""
        self._require(StepState.OPEN)
        if self.room():
            raise LedgerError(f"step {self.version + 1} still takes {self.room()} groups")
        if old := self._too_old_at(self.version, GroupState.LEASED):
            raise LedgerError(f"groups {old} are more than {self.limits.max_age} versions old")
        if late := self._too_old_at(self.version + 1, GroupState.INFLIGHT, GroupState.READY):
            raise LedgerError(f"groups {late} would be too old for the next step", code="left-behind")
        self._log(events.Finishing(step=self.version + 1))
        self.step = StepState.FINISHING

    def finish(self) -> None:
        """Record that the optimizer has stepped: mark the step's groups as TRAINED and increment the version."""
        self._require(StepState.FINISHING)
        chunks = tuple(self._chunks)
        self._log(events.Finished(step=self.version + 1, chunks=chunks))
        for position in self._leased():
            del self._groups[position]
        self.version += 1
        self._steps[self.version] = chunks
        self._chunks = []
        self.step = StepState.COMMITTED

    def lost(self, reason: str) -> None:
        """Treat the step as aborted, although the optimizer may have stepped."""
        self._require(StepState.FINISHING)
        self._log(events.Lost(step=self.version + 1, reason=reason))
        self._return_leases()

    def abort(self, reason: str) -> None:
        self._require(StepState.OPEN)
        self._log(events.Aborted(step=self.version + 1, reason=reason))
        self._return_leases()

    def publish(self, digest: str = "") -> None:
        self._require(StepState.COMMITTED)
        self._log(events.Published(version=self.version, digest=digest))
        self.step = StepState.IDLE

    # Redo and resume

    def chunks_of(self, step: int) -> list[list[int]]:
        if step not in self._steps:
            raise LedgerError(
                f"the chunks of step {step} are not known; known are {[*self._steps]}", code="unknown-step"
            )
        return [[*chunk] for chunk in self._steps[step]]

    def retained(self, checkpoint_step: int) -> set[int]:
        """Return the positions of groups that are READY, LEASED or needed to redo the steps after `checkpoint_step`.

        Raises LedgerError if a step after `checkpoint_step` is forgotten.
        """
        if checkpoint_step < self._forgotten:
            raise LedgerError(
                f"steps up to {self._forgotten} are forgotten; step {checkpoint_step} is asked for",
                code="forgotten-step",
            )
        kept = (GroupState.READY, GroupState.LEASED)
        waiting = {group.position for group in self._groups.values() if group.state in kept}
        redone = (chunks for step, chunks in self._steps.items() if step > checkpoint_step)
        return waiting.union(*(chunk for chunks in redone for chunk in chunks))

    def checkpointed(self, step: int) -> None:
        if step <= self.version:  # otherwise `forget` raises
            self._log(events.Checkpointed(step=step))
        self.forget(step)

    def forget(self, step: int) -> None:
        """Forget the groups of all steps up to this one, which are never redone; raise LedgerError for a later step."""
        if step > self.version:
            raise LedgerError(
                f"step {step} is not finished; step {self.version} is the last one that is",
                code="unfinished-step",
            )
        self._forgotten = max(step, self._forgotten)
        self._steps = {one: chunks for one, chunks in self._steps.items() if one > step}

    def to_json(self) -> dict[str, Any]:
        """Return the state for resuming from the checkpoint of `version`; raise LedgerError while a step is open.

        Attempts under way are left out, as they end with the process. A resumed run's engines start with `version`.
        """
        if self.step not in (StepState.IDLE, StepState.COMMITTED):
            raise LedgerError(f"a step is {self.step.value}")
        return SavedLedger(
            groups_per_step=self.limits.groups_per_step,
            incarnation=self.incarnation,
            version=self.version,
            cursor=self.cursor,
            dropped=dict(self.dropped),
            groups=[
                SavedGroup(
                    position=group.position,
                    attempt=group.attempt,
                    failures=group.failures,
                    min_version=group.min_version if group.state is GroupState.READY else None,
                )
                for group in self._groups.values()
            ],
        ).model_dump()

    @classmethod
    def from_json(
        cls, saved: object, limits: Limits, log: Callable[[Event], None], *, incarnation: int | None = None
    ) -> Self:
        """Return a resumed run's ledger; groups that were READY stay so, and all others are PENDING.

        incarnation: a new number; None for the saved number plus one. Raises ValueError if `to_json` cannot have
        returned this state, or if the state does not match the limits or the incarnation.
        """
        was = SavedLedger.parse(saved, limits)
        incarnation = was.incarnation + 1 if incarnation is None else incarnation
        if incarnation <= was.incarnation:
            raise RefusedError(
                f"incarnation {incarnation} is not after that of the saved ledger, {was.incarnation}",
                code="incarnation",
            )
        ledger = cls(limits, log, version=was.version, incarnation=incarnation)
        ledger.cursor = was.cursor
        ledger.dropped = Counter(was.dropped)
        for one in was.groups:
            ledger._groups[one.position] = one.as_group()
            if one.min_version is None:
                heapq.heappush(ledger._pending, one.position)
        return ledger

    @property
    def _admitted(self) -> int:
        """The number of groups that may be live or trained now; spare groups count until the next optimizer step."""
        limits = self.limits
        steps = min(limits.max_age + self.published + 1, limits.last_step)
        early = self.step in (StepState.IDLE, StepState.OPEN) and self.version < limits.last_step
        spare = limits.spare if early else 0
        return steps * limits.groups_per_step + spare

    def _too_old_at(self, version: int, *states: GroupState) -> list[int]:
        """Return the positions of groups in these states that are too old to be trained at this version."""
        oldest = version - self.limits.max_age
        return [g.position for g in self._groups.values() if g.state in states and g.min_version < oldest]

    def _under_way(self, token: Token) -> Group | None:
        group = self._groups.get(token.position)
        if group is None or group.state is not GroupState.INFLIGHT:
            return None
        return group if (self.incarnation, group.attempt) == (token.incarnation, token.attempt) else None

    def _leased(self) -> Iterator[int]:
        return (position for chunk in self._chunks for position in chunk)

    def _return_leases(self) -> None:
        for position in self._leased():
            self._groups[position].state = GroupState.READY
        self._chunks = []
        self.step = StepState.IDLE

    def _require(self, state: StepState) -> None:
        if self.step is not state:
            raise LedgerError(f"the step is {self.step.value}, not {state.value}")
