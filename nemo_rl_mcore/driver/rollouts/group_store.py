"""The data of prompt groups by position: in memory, and in a folder for a checkpoint or a replay."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.rollouts.archive import GroupArchive
from nemo_rl_mcore.driver.rollouts.events import Segment
from nemo_rl_mcore.driver.rollouts.saved_groups import load_groups, save_groups
from nemo_rl_mcore.driver.rollouts.transcript import WEIGHT_VERSIONS, sampled_versions


@dataclass(frozen=True)
class Retention:
    """Says how long groups are kept that have been trained.

    until_checkpoint: in memory until a checkpoint holds what they taught; else no longer than their step. archive:
    what writes them down; None writes none.
    """

    until_checkpoint: bool = False
    archive: GroupArchive | None = None


class GroupStore:
    """Holds what was generated for each group until nobody needs it any more. Callers hold the scheduler's lock."""

    def __init__(self) -> None:
        self._groups: dict[int, BatchedDataDict] = {}
        self.bytes_held = 0
        """Of the tensors of all groups."""

    def __len__(self) -> int:
        """Return how many groups are held."""
        return len(self._groups)

    def __contains__(self, position: int) -> bool:
        """Say whether a group is held."""
        return position in self._groups

    @property
    def positions(self) -> list[int]:
        """Return the positions of the groups held, upwards."""
        return sorted(self._groups)

    def put(self, position: int, group: BatchedDataDict) -> None:
        """Hold a group, which is not copied; raises KeyError when it is held already."""
        if position in self._groups:
            raise KeyError(f"group {position} is held already")
        self._groups[position] = group
        self.bytes_held += _bytes(group)

    def get(self, position: int) -> BatchedDataDict:
        """Return the data of a group; raises KeyError, naming it, when it is not held."""
        if position not in self._groups:
            raise KeyError(f"group {position} is not held")
        return self._groups[position]

    def forget_all_but(self, retained: Collection[int]) -> None:
        """Forget what `Ledger.retained` does not name."""
        kept = {position: self._groups[position] for position in retained if position in self._groups}
        self._groups = kept
        self.bytes_held = sum(_bytes(group) for group in kept.values())

    def save(self, folder: Path, positions: Iterable[int]) -> None:
        """Write these groups into a folder, which is made; raises KeyError for a group that is not held."""
        save_groups(folder, {position: self.get(position) for position in sorted(positions)})

    def load(self, folder: Path) -> list[int]:
        """Hold the groups of a folder as well, and give their positions.

        Raises ValueError, naming the file, for damage; KeyError, and holds none, when one is held already.
        """
        loaded = load_groups(folder)
        if twice := sorted(loaded.keys() & self._groups.keys()):
            raise KeyError(f"groups {twice} are held already")
        for position, group in loaded.items():
            self.put(position, group)
        return [*loaded]


def _bytes(group: BatchedDataDict) -> int:
    return sum(value.nbytes for value in group.values() if isinstance(value, torch.Tensor))


def digest_of_group(batch: BatchedDataDict) -> str:
    """Return 16 hexadecimal digits of what was asked, answered, and how likely; the padding does not enter."""
    found = hashlib.blake2b(digest_size=8)
    columns = [batch[column].contiguous().numpy() for column in ("input_ids", "generation_logprobs")]
    for row, length in enumerate(batch["input_lengths"].tolist()):
        for column in columns:
            found.update(column[row, :length])
    return found.hexdigest()


def segments_of(versions_BT: torch.Tensor) -> list[Segment]:
    """Say from which token on a group is of which version: the oldest that sampled one of its rows' tokens there.

    versions_BT: int64, -1 after a row's end.
    """
    nothing = torch.iinfo(versions_BT.dtype).max
    oldest = [int(version) for version in versions_BT.masked_fill(versions_BT < 0, nothing).amin(0).numpy()]
    return [
        Segment(first, version)
        for first, version in enumerate(oldest)
        if version != nothing and (first == 0 or version != oldest[first - 1])
    ]


def versions_of(group: BatchedDataDict, version: int) -> list[Segment]:
    """Return the segments of a group; of `version` where the ranks that train have drawn it all, or nobody a token."""
    if WEIGHT_VERSIONS not in group:
        return [Segment(0, version)]
    return segments_of(sampled_versions(group)) or [Segment(0, version)]
