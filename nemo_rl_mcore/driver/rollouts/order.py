"""In which order a train step takes the groups that are answered, never one that is too old.

Orders are pure functions of the ledger's groups. To add one: a class here, and its name in `ORDERS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from nemo_rl_mcore.driver.rollouts.states import Group, GroupState


@dataclass(frozen=True)
class Room:
    """Room of the open step for further groups. version: of the weights that it trains."""

    groups: int
    groups_per_step: int
    version: int
    max_age: int


class Order(Protocol):
    """An order of consumption."""

    def taken(self, groups: Sequence[Group], room: Room) -> list[Group]:
        """Return the READY groups that the open step may take now, at most `room.groups`.

        groups: all that are neither leased nor done, in the order of their draw. No choice may leave a group that a
        later step would have to train when it is more than `max_age` versions old. With nothing under way it takes as
        many as are ready and the room holds, or the step would wait for ever.
        """
        ...

    def fits(self, groups: Sequence[Group], room: Room) -> bool:
        """Say whether all READY groups of a saved run can be trained in time; room: of a step that has none yet."""
        ...


class InOrder:
    """Takes groups in the order of their draw; the step waits for each of them.

    The composition of a step depends on nothing but the recipe. That none gets too old follows from the admission, see
    `ledger`.
    """

    def taken(self, groups: Sequence[Group], room: Room) -> list[Group]:
        """Take those that are answered of the next groups."""
        return [group for group in groups[: room.groups] if group.state is GroupState.READY]

    def fits(self, groups: Sequence[Group], room: Room) -> bool:
        """See `Order.fits`."""
        return all(
            room.version + _steps_ahead(rank, room) - group.min_version <= room.max_age
            for rank, group in enumerate(groups)
            if group.state is GroupState.READY
        )


class AsCompleted:
    """Takes whatever is answered, those first that must be trained soonest; the step waits for groups at `max_age`.

    A group must be trained at version `min_version + max_age` at the latest. A choice is safe while, up to every later
    version, the steps have room for all groups that must be trained by then (Hall's condition for unit jobs). To take
    a group at `max_age` first is not enough above `max_age` 1: several could reach it together.
    """

    def taken(self, groups: Sequence[Group], room: Room) -> list[Group]:
        """See `Order.taken`."""
        free, chosen = self._free_places(groups, room), list[Group]()
        ready = (group for group in groups if group.state is GroupState.READY)
        for group in sorted(ready, key=lambda one: (one.min_version, one.position)):
            # Steps in which it uses up a place that a more urgent group may need.
            steps = range(_steps_left(group, room))
            if len(chosen) == room.groups or any(free[ahead] < 1 for ahead in steps):
                break  # as would all later ones, which can wait as long or longer
            for ahead in steps:
                free[ahead] -= 1
            chosen.append(group)
        return chosen

    def fits(self, groups: Sequence[Group], room: Room) -> bool:
        """See `Order.fits`."""
        ready = [group for group in groups if group.state is GroupState.READY]
        in_time = all(_steps_left(group, room) >= 0 for group in ready)
        return in_time and min(self._free_places(ready, room)) >= 0

    def _free_places(self, groups: Sequence[Group], room: Room) -> list[int]:
        """Return [max_age + 1], of the open step and so many later ones together: places that no group must have."""
        due = Counter(_steps_left(group, room) for group in groups if group.state is not GroupState.PENDING)
        free, left = list[int](), room.groups
        for ahead in range(room.max_age + 1):
            left -= due[ahead]
            free.append(left)
            left += room.groups_per_step
        return free


def _steps_ahead(rank: int, room: Room) -> int:
    """Return in which later step a group is trained, by its place in the order of the draw; 0 for the open one."""
    return max(0, 1 + (rank - room.groups) // room.groups_per_step)


def _steps_left(group: Group, room: Room) -> int:
    """Return for how many steps a group can wait; below 0, it is too old already."""
    return group.min_version + room.max_age - room.version


ORDERS: Mapping[str, Order] = MappingProxyType({"in_order": InOrder(), "as_completed": AsCompleted()})
"""By the name that `order` of asynchronous rollouts has."""
