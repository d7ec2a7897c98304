"""What engines and ranks have drawn, on disk: a line for each response, from whoever drew it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from nemo_rl_mcore.errors import folder_error

JOURNAL_FOLDER = "journal"
"""In the folder of a run."""
ENGINE_NUMBER = "ENGINE_NUMBER"
"""The environment variable that numbers the processes of engines."""


class Journal:
    """Appends {"seed": key of the noise, "ids": what was drawn} to `<folder>/<writer>.jsonl`, a line a response.

    folder: None writes nothing. writer: `engine_N` or `rank_N`; one that starts anew goes on in its file.
    """

    def __init__(self, folder: str | None, writer: str) -> None:
        self._path = None if folder is None else Path(folder) / f"{writer}.jsonl"

    @classmethod
    def of_engine(cls, folder: str | None) -> Journal:
        """That of the engine in this process."""
        return cls(folder, f"engine_{os.environ.get(ENGINE_NUMBER, '0')}")

    def note_rows(self, seeds_B: Tensor, tokens_BT: Tensor, lengths_B: Tensor) -> None:
        """Append a response a row, its first tokens; all are int64. Raises FolderError."""
        for seed, ids, length in zip(seeds_B.tolist(), tokens_BT.tolist(), lengths_B.tolist(), strict=True):  # pyright: ignore[reportUnknownMemberType]
            self.note(seed, ids[:length])

    def note(self, seed: int, ids: Sequence[int]) -> None:
        """Append a response; raises FolderError."""
        if self._path is None:
            return
        line = json.dumps({"seed": seed, "ids": [*ids]}, separators=(",", ":"))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            raise folder_error("logger.log_dir", self._path.parent, error) from error
