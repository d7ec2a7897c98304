"""Keep the ledger of a run in a checkpoint, and check it when it is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import pairwise
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from nemo_rl_mcore.driver.rollouts.order import ORDERS, Room
from nemo_rl_mcore.driver.rollouts.states import Group, GroupState, Limits
from nemo_rl_mcore.errors import RefusedError

_Count = Annotated[int, Field(ge=0)]


class SavedGroup(BaseModel):
    """A group that is neither trained nor dropped. min_version: of a ready one; the others are to be generated."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    position: _Count
    attempt: _Count
    failures: _Count
    min_version: _Count | None

    @classmethod
    def of(cls, group: Group) -> Self:
        """Return what a checkpoint keeps of a group."""
        ready = group.state is GroupState.READY
        return cls(
            position=group.position,
            attempt=group.attempt,
            failures=group.failures,
            min_version=group.min_version if ready else None,
        )

    def as_group(self) -> Group:
        """Return what the ledger of a resumed run has of it."""
        group = Group(self.position, self.attempt, self.failures)
        if self.min_version is not None:
            group.state, group.min_version = GroupState.READY, self.min_version
        return group


class _Drop(BaseModel):
    """A group that was dropped, as earlier versions list them."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    position: _Count
    reason: str


_LISTED = TypeAdapter(list[_Drop])


def _counted(dropped: object) -> object:
    """Read the form of earlier versions too, a list of groups."""
    if not isinstance(dropped, list):
        return dropped
    drops = _LISTED.validate_python(dropped)
    if len({drop.position for drop in drops}) < len(drops):
        raise ValueError("a group is dropped twice")
    return dict(Counter(drop.reason for drop in drops))


_Drops = Annotated[dict[Annotated[str, Field(min_length=1)], _Count], BeforeValidator(_counted)]


class SavedLedger(BaseModel):
    """A ledger between two steps. groups: by position, upwards. dropped: how many, by the reason."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    groups_per_step: Annotated[int, Field(ge=1)]
    incarnation: _Count
    version: _Count
    cursor: _Count
    dropped: _Drops
    groups: list[SavedGroup]

    @property
    def ready(self) -> list[int]:
        """Return the positions of the groups that are to be trained as they are."""
        return [group.position for group in self.groups if group.min_version is not None]

    def without(self, positions: Collection[int]) -> Self:
        """Return the ledger in which these groups are to be generated again."""
        groups = [
            one.model_copy(update={"min_version": None}) if one.position in positions else one
            for one in self.groups
        ]
        return self.model_copy(update={"groups": groups})

    @classmethod
    def parse(cls, saved: object, limits: Limits) -> Self:
        """Read what `model_dump` gave, for a run with these limits; raises ValueError, naming what is wrong."""
        try:
            ledger = cls.model_validate(saved)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "it"
            raise _broken("ledger-fields", f"{place}: {first['msg']}") from error
        if refusal := ledger._damage() or ledger._conflict(limits):
            raise refusal
        return ledger

    def _damage(self) -> RefusedError | None:
        positions = [group.position for group in self.groups]
        if any(later <= earlier for earlier, later in pairwise([*positions, self.cursor])):
            return _broken("ledger-order", "its groups are not in order, or not before the cursor")
        if self.version * self.groups_per_step + sum(self.dropped.values()) + len(positions) != self.cursor:
            return _broken("ledger-positions", "positions before the cursor are missing")
        if any((group.min_version or 0) > self.version for group in self.groups):
            return _broken("ledger-versions", "a group is newer than the weights")
        return None

    def _conflict(self, limits: Limits) -> RefusedError | None:
        groups_per_step, max_age = limits.groups_per_step, limits.max_age
        if groups_per_step != self.groups_per_step:
            return RefusedError(
                f"{limits.groups_key} is {groups_per_step}, and the saved run had {self.groups_per_step}: "
                "which prompts are left would not be known; set it back",
                code="groups-per-step",
            )
        # Spare ones that the step does not take are put away at its end.
        room = Room(groups_per_step + limits.spare, groups_per_step, self.version, max_age)
        if not ORDERS[limits.order].fits([one.as_group() for one in self.groups], room):
            return RefusedError(
                f"{limits.age_key} is {max_age} and the order {limits.order}, and the saved run has groups ready that "
                "will be older when they are trained; set both back",
                code="trajectory-age",
            )
        return None


def _broken(code: str, what: str) -> RefusedError:
    return RefusedError(f"the saved ledger is broken: {what}", code=code)
