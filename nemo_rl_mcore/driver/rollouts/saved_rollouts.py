"""Keep the rollouts of a run in a checkpoint: the ledger, where its log stood, and the groups that were ready.

In `step_N/rollouts`: `ledger.json`, the ledger between two steps with a mark in the log, and `ready/`, the groups as
those that are kept for a replay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.strict_json import read_json
from nemo_rl_mcore.driver.rollouts.event_log import LogMark
from nemo_rl_mcore.driver.rollouts.saved_groups import load_groups, save_groups
from nemo_rl_mcore.driver.rollouts.saved_ledger import SavedLedger
from nemo_rl_mcore.errors import RefusedError

LEDGER_FILE = "ledger.json"
READY_FOLDER = "ready"


class _LedgerFile(BaseModel):
    """`ledger.json`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    ledger: SavedLedger
    log: LogMark


@dataclass(frozen=True)
class SavedRollouts:
    """ledger: as `Ledger.to_json` gives it. log: what had been logged then. ready: the groups, by position."""

    ledger: SavedLedger
    log: LogMark
    ready: Mapping[int, BatchedDataDict]

    def save(self, folder: Path) -> None:
        """Write it into a folder, which is made; raises OSError, and ValueError as `save_groups` does."""
        folder.mkdir()
        text = _LedgerFile(ledger=self.ledger, log=self.log).model_dump_json()
        (folder / LEDGER_FILE).write_text(text, encoding="utf-8")
        save_groups(folder / READY_FOLDER, self.ready)

    @classmethod
    def load(cls, folder: Path, version: int) -> Self:
        """Read what `save` wrote in the checkpoint of a version; raises ValueError, naming the file, for damage."""
        path = folder / LEDGER_FILE
        try:
            file = _LedgerFile.model_validate(read_json(path, follow_links=False))
        except (OSError, ValidationError, ValueError) as error:
            raise RefusedError(
                f"{path} cannot be read: {' '.join(str(error).split())}", code="unreadable-file"
            ) from error
        ready = load_groups(folder / READY_FOLDER)
        if file.ledger.version != version or sorted(ready) != file.ledger.ready:
            raise RefusedError(f"{path} does not go with the files next to it", code="unequal-files")
        return cls(file.ledger, file.log, ready)

    def without(self, positions: Collection[int]) -> Self:
        """Return what is left when these groups are to be generated again."""
        left = {position: group for position, group in self.ready.items() if position not in positions}
        return replace(self, ledger=self.ledger.without(positions), ready=left)
