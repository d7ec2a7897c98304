"""What a checkpoint keeps of the ledger of its run, checked when it is read."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_rl_mcore.errors import RefusedError

_Count = Annotated[int, Field(ge=0)]


class SavedGroup(BaseModel):
    """A group that is neither trained nor dropped. min_version: of a ready one; the others are to be generated."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    position: _Count
    attempt: _Count
    failures: _Count
    min_version: _Count | None


class SavedDrop(BaseModel):
    """A group that was dropped, and why."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    position: _Count
    reason: Annotated[str, Field(min_length=1)]


class SavedLedger(BaseModel):
    """A ledger between two steps. groups: by position, upwards."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    groups_per_step: Annotated[int, Field(ge=1)]
    incarnation: _Count
    version: _Count
    cursor: _Count
    dropped: list[SavedDrop]
    groups: list[SavedGroup]

    @property
    def ready(self) -> list[int]:
        """The positions of the groups that are to be trained as they are."""
        return [group.position for group in self.groups if group.min_version is not None]

    def without(self, positions: Collection[int]) -> Self:
        """The ledger in which these groups are to be generated again."""
        groups = [
            one.model_copy(update={"min_version": None}) if one.position in positions else one
            for one in self.groups
        ]
        return self.model_copy(update={"groups": groups})

    @classmethod
    def parse(cls, saved: object, groups_per_step: int, max_age: int) -> Self:
        """Read what `model_dump` gave, for a run with these limits; raises ValueError, naming what is wrong."""
        try:
            ledger = cls.model_validate(saved)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "it"
            raise _broken("ledger-fields", f"{place}: {first['msg']}") from error
        if refusal := ledger._damage() or ledger._conflict(groups_per_step, max_age):
            raise refusal
        return ledger

    def _damage(self) -> RefusedError | None:
        positions = [group.position for group in self.groups]
        dropped = {drop.position for drop in self.dropped}
        if any(later <= earlier for earlier, later in pairwise([*positions, self.cursor])):
            return _broken("ledger-order", "its groups are not in order, or not before the cursor")
        if self.version * self.groups_per_step + len(dropped) + len(positions) != self.cursor:
            return _broken("ledger-positions", "positions before the cursor are missing")
        if not dropped.isdisjoint(positions) or max(dropped, default=-1) >= self.cursor:
            return _broken("ledger-dropped", "a group is dropped and still there")
        if any((group.min_version or 0) > self.version for group in self.groups):
            return _broken("ledger-versions", "a group is newer than the weights")
        return None

    def _conflict(self, groups_per_step: int, max_age: int) -> RefusedError | None:
        if groups_per_step != self.groups_per_step:
            return RefusedError(
                f"grpo.num_prompts_per_step is {groups_per_step}, and the saved run had {self.groups_per_step}: "
                "which prompts are left would not be known; set it back",
                code="groups-per-step",
            )
        for rank, group in enumerate(self.groups):
            trained_at = self.version + rank // groups_per_step
            if group.min_version is not None and trained_at - group.min_version > max_age:
                return RefusedError(
                    f"grpo.async_grpo.max_trajectory_age_steps is {max_age}, and the saved run has groups ready that "
                    f"will be {trained_at - group.min_version} versions old when they are trained; set it back",
                    code="trajectory-age",
                )
        return None


def _broken(code: str, what: str) -> RefusedError:
    return RefusedError(f"the saved ledger is broken: {what}", code=code)
