"""The places of ranks, as a cluster gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


@dataclass(frozen=True)
class RankSlot:
    """Where one rank runs, and the environment that tells it who it is."""

    rank: int
    environment: Mapping[str, str]
    options: Mapping[str, Any]
    """Scheduling options of the Ray actor."""


@dataclass(frozen=True)
class Placement:
    """The slots of one worker group; `release` gives the resources back."""

    slots: tuple[RankSlot, ...] = ()
    group: PlacementGroup | None = None

    def release(self) -> None:
        """Free the reserved resources; nothing to do for CPU ranks of this machine alone."""
        if self.group is None:
            return
        import ray
        from ray.util.placement_group import remove_placement_group

        if ray.is_initialized():
            remove_placement_group(self.group)
