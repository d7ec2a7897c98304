"""Keep the state of every prompt group of a run: pure bookkeeping without a lock; callers hold the scheduler's.

Groups are trained in the order in which their prompts were drawn, or in another of `ORDERS`, n a step, and are
dispatched while

    live + trained < (max_age + published + 1) * n.

So a group that is trained at version `rank // n` was dispatched when at least version `rank // n - max_age` was
published: none is ever too old to be trained, and nothing is discarded for its age. `published`, not `version`: between
a step's end and its publication engines still answer with the weights before. A group's rank is its place among those
that have not been dropped, so a drop lowers the ranks, and with them the ages, of all later groups. In other orders
it makes a safe choice possible: a version's groups and those before need no more steps than are left to them.

Orders are pure functions of the ledger's groups, and never take one that is too old. To add one: a class here, and its
name in `ORDERS`. `taken`: the READY groups that the open step may take now, at most `room.groups`, of all that are
neither leased nor done, in the order of their draw. No choice may leave a group that a later step would have to train
when it is more than `max_age` versions old. With nothing under way it takes all READY groups up to the room, or the
step would wait for ever. `fits`: all READY groups of a saved run can be trained in time; room: of a step that has
none yet.
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
    """A group is live while INFLIGHT, READY or LEASED; TRAINED and DROPPED (unanswerable or unused) are for good."""

    PENDING = "pending"
    INFLIGHT = "inflight"
    READY = "ready"
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"


class StepState(Enum):
    """A train step is IDLE, OPEN, FINISHING, COMMITTED until its weights are published, IDLE again."""

    IDLE = "idle"
    OPEN = "open"
    FINISHING = "finishing"
    COMMITTED = "committed"


class LedgerError(CodedError, RuntimeError):
    """An event that the state does not allow, or an impossible state: a mistake of the controller or an engine."""


@dataclass(frozen=True)
class Limits:
    """A run's limits. max_age: versions that a group may be behind when it is trained. max_attempts: may fail.

    spare: groups beyond those of the steps, for dynamic sampling to leave some out. order: a name in `ORDERS`.
    groups_key, age_key: a recipe's keys of the first two, for messages.
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
    """A group that is neither trained nor dropped. min_version: a lower bound of its tokens' versions."""

    position: int
    attempt: int = 0
    failures: int = 0
    min_version: int = 0
    state: GroupState = GroupState.PENDING


@dataclass(frozen=True)
class Room:
    """The open step's room for further groups. version: of the weights that it trains."""

    groups: int
    groups_per_step: int
    version: int
    max_age: int

    def steps_left(self, group: Group) -> int:
        """Return the steps that a group can wait; below 0, it is too old already."""
        return group.min_version + self.max_age - self.version


class InOrder:
    """Takes groups in the order of their draw; the step waits for each of them.

    A step's composition depends on nothing but the recipe. None gets too old, by the admission above.
    """

    def taken(self, groups: Sequence[Group], room: Room) -> list[Group]:
        return [group for group in groups[: room.groups] if group.state is GroupState.READY]

    def fits(self, groups: Sequence[Group], room: Room) -> bool:
        for rank, group in enumerate(groups):
            # The later step that trains it, by its place in the order of the draw; 0 is the open one.
            ahead = max(0, 1 + (rank - room.groups) // room.groups_per_step)
            if group.state is GroupState.READY and ahead > room.steps_left(group):
                return False
        return True


class AsCompleted:
    """Takes whatever is answered, those first that must be trained soonest; the step waits for groups at `max_age`.

    A group must be trained at version `min_version + max_age` at the latest. A choice is safe while, up to every later
    version, the steps have room for all groups that must be trained by then (Hall's condition for unit jobs). To take
    a group at `max_age` first is not enough above `max_age` 1: several could reach it together.
    """

    def taken(self, groups: Sequence[Group], room: Room) -> list[Group]:
        free, chosen = self._free_places(groups, room), list[Group]()
        ready = (group for group in groups if group.state is GroupState.READY)
        for group in sorted(ready, key=lambda one: (one.min_version, one.position)):
            # Steps in which it uses up a place that a more urgent group may need.
            steps = range(room.steps_left(group))
            if len(chosen) == room.groups or any(free[ahead] < 1 for ahead in steps):
                break  # as would all later ones, which can wait as long or longer
            for ahead in steps:
                free[ahead] -= 1
            chosen.append(group)
        return chosen

    def fits(self, groups: Sequence[Group], room: Room) -> bool:
        ready = [group for group in groups if group.state is GroupState.READY]
        in_time = all(room.steps_left(group) >= 0 for group in ready)
        return in_time and min(self._free_places(ready, room)) >= 0

    def _free_places(self, groups: Sequence[Group], room: Room) -> list[int]:
        """Return [max_age + 1], of the open step and so many later ones together: places that no group must have."""
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
"""By the key `order` of asynchronous rollouts."""


class SavedGroup(Exactly):
    """A group that is neither trained nor dropped. min_version: of a ready one; the others are to be generated."""

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
    """A ledger between two steps. groups: by position, upwards. dropped: how many, by the reason."""

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
        """Read the result of `model_dump`, for a run with these limits; raises ValueError, naming the fault."""
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
        # Spare ones that the step does not take are put away at its end.
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

    Each event goes to `log`, in order, before anything here changes: when `log` raises, it has not happened. Calls
    that the state does not allow raise LedgerError and change nothing. Only groups that still matter are kept, so that
    a call costs the same at any step of a long run.

    version: of the weights at the start; the groups of all steps up to it are trained, and `from_json` restores those
    that were dropped. incarnation: how often the driver has been resumed; attempts of an earlier one are void.
    """

    def __init__(
        self, limits: Limits, log: Callable[[Event], None], *, version: int = 0, incarnation: int = 0
    ) -> None:
        self.limits = limits
        self.incarnation = incarnation
        self.version = version
        """Steps finished."""
        self.step = StepState.IDLE
        self.cursor = version * limits.groups_per_step
        """The next position that has never been dispatched."""
        self.dropped = Counter[str]()
        """Groups that have been dropped or left out, by the reason."""
        self._order = ORDERS[limits.order]
        self._log = log
        self._groups: dict[int, Group] = {}  # by position, upwards
        self._pending: list[int] = []  # a heap
        self._chunks: list[tuple[int, ...]] = []
        self._steps: dict[int, tuple[tuple[int, ...], ...]] = {}  # of the steps that may have to be redone
        self._forgotten = version
        log(events.Started(incarnation=incarnation, version=version))

    @property
    def published(self) -> int:
        """The version that engines hold: `version`, or one less while the step is COMMITTED."""
        return self.version - (self.step is StepState.COMMITTED)

    @property
    def live(self) -> int:
        return len(self._groups) - len(self._pending)

    @property
    def trained(self) -> int:
        return self.version * self.limits.groups_per_step

    def count(self, state: GroupState) -> int:
        if state is GroupState.TRAINED:
            return self.trained
        if state is GroupState.DROPPED:
            return self.dropped.total()
        return sum(group.state is state for group in self._groups.values())

    # Rollouts

    def may_dispatch(self) -> bool:
        return self.live + self.trained < self._admitted

    @property
    def reach(self) -> range:
        """The positions from the first that is not done to the last that may be dispatched within a step."""
        more = max(0, self._admitted - self.trained - len(self._groups))
        return range(next(iter(self._groups), self.cursor), self.cursor + more)

    @property
    def next_position(self) -> int:
        return self._pending[0] if self._pending else self.cursor

    def dispatch(self) -> Token:
        """Begin an attempt at the first group that has none; raises LedgerError unless `may_dispatch`."""
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
        """Take a generated group as READY; False, and nothing changes, for an attempt that is not under way any more.

        Raises LedgerError for tokens older than the version published at the dispatch or newer than the trainer's, and
        for segments that do not begin at 0 and go upwards: the engine is broken.
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
        """Count a failed attempt: the group is to be generated again, or is DROPPED when `max_attempts` have failed.

        False, and nothing changes, for an attempt that is not under way any more.
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
            self._return_to_pending(group)
        return True

    def requeue(self, token: Token, reason: str) -> bool:
        """Have the group played again, from its first turn; the attempt, as when its engine dies, is no failure.

        False, and nothing changes, for an attempt that is not under way any more.
        """
        group = self._under_way(token)
        if group is None:
            return False
        self._log(events.Cancelled(token=token, reason=reason))
        self._return_to_pending(group)
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
        """Open the next step and give its number; raises LedgerError unless IDLE, or after the last step."""
        self._require(StepState.IDLE)
        if self.version >= self.limits.last_step:
            raise LedgerError(f"step {self.version} was the last one")
        self._log(events.Begun(step=self.version + 1))
        self.step = StepState.OPEN
        return self.version + 1

    def room(self) -> int:
        """Count the groups that the open step still takes; 0 when none is open."""
        if self.step is not StepState.OPEN:
            return 0
        return self.limits.groups_per_step - sum(len(chunk) for chunk in self._chunks)

    def leasable(self) -> list[int]:
        """Return the READY groups that the open step may take now, see `order`."""
        others = [group for group in self._groups.values() if group.state is not GroupState.LEASED]
        room = Room(self.room(), self.limits.groups_per_step, self.version, self.limits.max_age)
        return [group.position for group in self._order.taken(others, room)]

    def lease(self, positions: Sequence[int]) -> None:
        """Give these groups to the open step as its next chunk; raises LedgerError for any that is not leasable."""
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
        """Record that the optimizer is about to step; raises LedgerError unless the step is full."""
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
        """Record that the optimizer has stepped: the step's groups are TRAINED, the version is one higher."""
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
        """Record that the optimizer may have stepped or not: the step counts as aborted."""
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
        """Return the groups whose rows a redo of the steps after this one needs: theirs, READY and LEASED ones.

        Raises LedgerError when a step after it is forgotten.
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
        self._require_finished(step)
        self._log(events.Checkpointed(step=step))
        self.forget(step)

    def forget(self, step: int) -> None:
        """Forget the groups of the steps up to this one, which are never redone."""
        self._require_finished(step)
        self._forgotten = max(step, self._forgotten)
        self._steps = {one: chunks for one, chunks in self._steps.items() if one > step}

    def to_json(self) -> dict[str, Any]:
        """Return the state for a resume from the checkpoint of `version`; raises LedgerError while a step is open.

        Attempts under way are left out: they end with the process. Engines of a resumed run begin with `version`.
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
        """Return a resumed run's ledger; READY groups are READY, attempts that were under way are not.

        incarnation: a new one; None: the next after the save. Raises ValueError for a state that `to_json` cannot have
        given, and for limits and an incarnation that it cannot go on with.
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
        """The groups that may be live or trained now; spare ones only until the next optimizer step."""
        limits = self.limits
        steps = min(limits.max_age + self.published + 1, limits.last_step)
        early = self.step in (StepState.IDLE, StepState.OPEN) and self.version < limits.last_step
        spare = limits.spare if early else 0
        return steps * limits.groups_per_step + spare

    def _too_old_at(self, version: int, *states: GroupState) -> list[int]:
        """Return the groups in these states that this version may not be given any more."""
        oldest = version - self.limits.max_age
        return [g.position for g in self._groups.values() if g.state in states and g.min_version < oldest]

    def _under_way(self, token: Token) -> Group | None:
        group = self._groups.get(token.position)
        if group is None or group.state is not GroupState.INFLIGHT:
            return None
        return group if (self.incarnation, group.attempt) == (token.incarnation, token.attempt) else None

    def _return_to_pending(self, group: Group) -> None:
        group.state = GroupState.PENDING
        heapq.heappush(self._pending, group.position)

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

    def _require_finished(self, step: int) -> None:
        if step > self.version:
            raise LedgerError(
                f"step {step} is not finished; step {self.version} is the last one that is",
                code="unfinished-step",
            )
