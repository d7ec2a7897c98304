"""The groups that a run keeps for a replay: a folder for each step, and no more of them than their disk holds."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.rollouts.saved_groups import save_groups
from nemo_rl_mcore.errors import folder_error

_STEP, _ASIDE = "step_", "aside_step_"


class GroupArchive:
    """Writes `<root>/step_N`, and removes the oldest steps once there are more bytes than it may hold.

    A replay begins at a checkpoint: steps after the last one stay, whatever they hold. Of a run without checkpoints it
    begins with the first step: nothing is removed, and steps that do not fit are not written, nor any after them.

    Args:
        root: the folder, which is made. What a resume has set aside there goes first.
        most_bytes: of all that it holds.
        checkpoints: whether the run has some.
        step: the last checkpoint, from which the run goes on; 0 for none.

    """

    def __init__(self, root: Path, most_bytes: float, *, checkpoints: bool, step: int = 0) -> None:
        self._root, self._most, self._checkpoints = root, most_bytes, checkpoints
        self._saved, self._full = step, False
        self._held = {name: _bytes(root / name) for name in _folders(root)}
        """By folder, the ones that are removed first before the others."""

    def keep(self, step: int, groups: Mapping[int, BatchedDataDict]) -> None:
        """Write the groups of a finished step, by position; raises FolderError."""
        if self._full:
            return
        name = f"{_STEP}{step}"
        try:
            save_groups(self._root / name, groups)
            self._held[name] = _bytes(self._root / name)
            self._remove_oldest()
            if not self._checkpoints and sum(self._held.values()) > self._most:
                self._remove(name)
                self._full = True
                write_line(
                    sys.stdout, f"{self._root} is full: the groups of step {step} and later are not kept"
                )
        except OSError as error:
            raise folder_error("logger.log_dir", self._root, error) from error

    def checkpointed(self, step: int) -> None:
        """Take note that a replay may begin after this step; raises FolderError."""
        self._saved = step
        try:
            self._remove_oldest()
        except OSError as error:
            raise folder_error("logger.log_dir", self._root, error) from error

    def _remove_oldest(self) -> None:
        for name in [*self._held]:
            if sum(self._held.values()) <= self._most:
                return
            if name.startswith(_ASIDE) or int(name.removeprefix(_STEP)) <= self._saved:
                self._remove(name)

    def _remove(self, name: str) -> None:
        shutil.rmtree(self._root / name)
        del self._held[name]


def _folders(root: Path) -> list[str]:
    """Return the names of what is set aside, and then the steps upwards."""
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    steps = [name for name in names if name.removeprefix(_STEP).isdecimal()]
    aside = sorted(name for name in names if name.startswith(_ASIDE))
    return aside + sorted(steps, key=lambda name: int(name.removeprefix(_STEP)))


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
