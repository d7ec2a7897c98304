"""The states of groups and of the train step of a run, its limits, and in which order a step takes answered groups.

Orders are pure functions of the ledger's groups, and never take one that is too old. To add one: a class here, and its
name in `ORDERS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Protocol

from nemo_rl_mcore.errors import CodedError


class GroupState(Enum):
    """State of a group. It is live while INFLIGHT, READY or LEASED; TRAINED and DROPPED are for good.

    DROPPED are groups that cannot be answered, and answered ones that nothing is trained on.
    """

    PENDING = "pending"
    INFLIGHT = "inflight"
    READY = "ready"
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"


class StepState(Enum):
    """State of the train step: IDLE, OPEN, FINISHING, COMMITTED until its weights are published, IDLE again."""

    IDLE = "idle"
    OPEN = "open"
    FINISHING = "finishing"
    COMMITTED = "committed"


class LedgerError(CodedError, RuntimeError):
    """An event that the state does not allow, or a state that cannot be: a mistake of the controller or an engine."""


@dataclass(frozen=True)
class Limits:
    """Of a run. max_age: versions that a group may be behind when it is trained. max_attempts: that may fail.

    spare: groups that may be asked for beyond those of the steps, for dynamic sampling to leave some out.
    order: a name of `ORDERS`.
    groups_key, age_key: where a recipe of the run's algorithm sets the first two, for messages.
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
    """Room of the open step for further groups. version: of the weights that it trains."""

    groups: int
    groups_per_step: int
    version: int
    max_age: int

    def steps_left(self, group: Group) -> int:
        """Return for how many steps a group can wait; below 0, it is too old already."""
        return group.min_version + self.max_age - self.version


class Order(Protocol):
    """An order of consumption.

    `taken`: the READY groups that the open step may take now, at most `room.groups`, of all that are neither leased nor
    done, in the order of their draw. No choice may leave a group that a later step would have to train when it is more
    than `max_age` versions old. With nothing under way it takes as many as are ready and the room holds, or the step
    would wait for ever.
    `fits`: all READY groups of a saved run can be trained in time; room: of a step that has none yet.
    """

    def taken(self, groups: Sequence[Group], room: Room) -> list[Group]: ...

    def fits(self, groups: Sequence[Group], room: Room) -> bool: ...


class InOrder:
    """Takes groups in the order of their draw; the step waits for each of them.

    The composition of a step depends on nothing but the recipe. That none gets too old follows from the admission, see
    `ledger`.
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


ORDERS: Mapping[str, Order] = MappingProxyType({"in_order": InOrder(), "as_completed": AsCompleted()})
"""By the name that `order` of asynchronous rollouts has."""
