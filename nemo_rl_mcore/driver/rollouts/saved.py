"""What is saved of the rollouts of a run: groups in a folder, for a checkpoint or a replay, and the ledger.

A checkpoint has them in `step_N/rollouts`: `ledger.json`, the ledger between two steps with a mark in the log, and
`ready/`, the groups that were ready. What is read is checked, and nothing in it is executed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save_file  # pyright: ignore[reportUnknownVariableType]

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.strict_json import parse_json, read_json, read_regular
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.rollouts.events import LogMark, Segment
from nemo_rl_mcore.driver.rollouts.ledger import Count, Exactly, SavedLedger
from nemo_rl_mcore.driver.rollouts.transcript import RESPONSES, WEIGHT_VERSIONS, sampled_versions
from nemo_rl_mcore.errors import RefusedError, code_of, folder_error
from nemo_rl_mcore.rank.checkpoints import read_sums, require_sums, sha256, write_sums

TENSORS_FILE = "groups.safetensors"
TEXTS_FILE = "groups.json"
LEDGER_FILE = "ledger.json"
READY_FOLDER = "ready"
_STEP, _ASIDE = "step_", "aside_step_"


# Groups: tensors, named POSITION.KEY, in a safetensors file, all else in JSON, and the checksums of both


class _Group(Exactly):
    """A group but for its tensors. entries: the keys of the batch in order; None for a tensor, or a value a row."""

    position: Count
    entries: dict[str, list[Any] | None]


class _Groups(Exactly):
    groups: list[_Group]


def save_groups(folder: Path, groups: Mapping[int, BatchedDataDict]) -> None:
    """Write groups by position into a folder, which is made.

    Raises ValueError, naming group and key, for a batch with values that JSON would change, and OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts: list[_Group] = []
    tensors: dict[str, torch.Tensor] = {}
    storages = set[int]()
    for position, batch in groups.items():
        entries: dict[str, list[Any] | None] = {}
        for key, value in batch.items():
            if key == RESPONSES:  # decoded again by whoever reads the group
                continue
            if isinstance(value, torch.Tensor):
                entries[key], tensor = None, value.detach().cpu().contiguous()
                storage = tensor.untyped_storage().data_ptr()
                # A file has each tensor on its own; two of one storage are refused.
                tensors[f"{position}.{key}"] = tensor.clone() if storage in storages else tensor
                storages.add(storage)
                continue
            try:
                unchanged = json.loads(json.dumps(value, allow_nan=False)) == value
            except (TypeError, ValueError):
                unchanged = False
            if not unchanged:
                raise RefusedError(
                    f"group {position} cannot be saved: {key!r} holds values that JSON would change",
                    code="json-values",
                )
            entries[key] = value
        texts.append(_Group(position=position, entries=entries))
    try:
        save_file(tensors, folder / TENSORS_FILE)
    except SafetensorError as error:  # of the operating system, in words alone
        raise OSError(errno.EIO, str(error), str(folder / TENSORS_FILE)) from error
    (folder / TEXTS_FILE).write_text(_Groups(groups=texts).model_dump_json(), encoding="utf-8")
    write_sums(folder, {name: sha256(folder / name) for name in (TENSORS_FILE, TEXTS_FILE)})


def load_groups(folder: Path) -> dict[int, BatchedDataDict]:
    """Return the groups of a folder by position, with the same bits; raises ValueError, naming the file, for damage."""
    sums = read_sums(folder)
    if sums is None:
        raise ValueError(
            f"{folder} holds no saved groups, or only a part of them: it has no list of checksums"
        )
    require_sums(folder, sums, (TENSORS_FILE, TEXTS_FILE))
    try:
        text = read_regular(folder / TEXTS_FILE, follow_links=False)
        parse_json(text)  # stricter than what follows: a key that is there twice is damage, too
        texts = _Groups.model_validate_json(text).groups
    except (OSError, ValueError) as error:
        raise RefusedError(
            f"{folder / TEXTS_FILE} cannot be read: {error}", code="unreadable-file"
        ) from error
    if len({one.position for one in texts}) < len(texts):
        raise RefusedError(f"{folder / TEXTS_FILE} is broken: a group is there twice", code="group-twice")
    try:
        tensors = load(read_regular(folder / TENSORS_FILE, follow_links=False))
    except (OSError, SafetensorError) as error:
        raise RefusedError(
            f"{folder / TENSORS_FILE} cannot be read: {error}", code="unreadable-file"
        ) from error
    expected = {f"{one.position}.{key}" for one in texts for key, rows in one.entries.items() if rows is None}
    if expected != tensors.keys():
        differing = sorted(expected ^ tensors.keys())[:8]
        raise RefusedError(
            f"{folder / TENSORS_FILE} does not go with {TEXTS_FILE}: {', '.join(differing)}",
            code="unequal-files",
        )
    found: dict[int, BatchedDataDict] = {}
    try:
        for one in texts:
            entries = one.entries.items()
            found[one.position] = BatchedDataDict(
                {key: tensors[f"{one.position}.{key}"] if rows is None else rows for key, rows in entries}
            )
    except ValueError as error:
        raise RefusedError(f"{folder / TEXTS_FILE} is broken: {error}", code=code_of(error)) from error
    return found


def digest_of_group(batch: BatchedDataDict) -> str:
    """Return 16 hexadecimal digits of what was asked, answered, and how likely; the padding does not enter."""
    found = hashlib.blake2b(digest_size=8)
    columns = [batch[column].contiguous().numpy() for column in ("input_ids", "generation_logprobs")]
    for row, length in enumerate(batch["input_lengths"].tolist()):
        for column in columns:
            found.update(column[row, :length])
    return found.hexdigest()


def versions_of(group: BatchedDataDict, version: int) -> list[Segment]:
    """Return the segments of a group; of `version` where the ranks that train have drawn it all, or nobody a token."""
    if WEIGHT_VERSIONS not in group:
        return [Segment(0, version)]
    versions_BT = sampled_versions(group)
    nothing = torch.iinfo(versions_BT.dtype).max
    # Of each token the oldest that sampled one of the rows' tokens there.
    oldest = [int(one) for one in versions_BT.masked_fill(versions_BT < 0, nothing).amin(0).numpy()]
    return [
        Segment(first, one)
        for first, one in enumerate(oldest)
        if one != nothing and (first == 0 or one != oldest[first - 1])
    ] or [Segment(0, version)]


class GroupArchive:
    """Writes the groups that are kept for a replay into `<root>/step_N`, and no more of them than it may hold.

    The oldest steps go first. A replay begins at a checkpoint: steps after the last one stay, whatever they hold. Of a
    run without checkpoints it begins with the first step: nothing is removed, and steps that do not fit are not
    written, nor any after them.

    root: the folder, which is made. What a resume has set aside there goes first. most_bytes: of all that it holds.
    checkpoints: whether the run has some. step: the last one, from which the run goes on; 0 for none.
    """

    def __init__(self, root: Path, most_bytes: float, *, checkpoints: bool, step: int = 0) -> None:
        self._root, self._most, self._checkpoints = root, most_bytes, checkpoints
        self._saved, self._full = step, False
        names = [path.name for path in root.iterdir()] if root.is_dir() else []
        steps = [name for name in names if name.removeprefix(_STEP).isdecimal()]
        aside = sorted(name for name in names if name.startswith(_ASIDE))
        in_order = aside + sorted(steps, key=lambda name: int(name.removeprefix(_STEP)))
        self._held = {name: _bytes(root / name) for name in in_order}
        """By folder, the ones that are removed first before the others."""

    def keep(self, step: int, groups: Mapping[int, BatchedDataDict]) -> None:
        """Write the groups of a finished step, by position; raises FolderError."""
        if self._full:
            return
        folder = self._root / f"{_STEP}{step}"
        try:
            save_groups(folder, groups)
            self._held[folder.name] = _bytes(folder)
            self._make_room()
            if not self._checkpoints and sum(self._held.values()) > self._most:
                shutil.rmtree(folder)
                del self._held[folder.name]
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
            self._make_room()
        except OSError as error:
            raise folder_error("logger.log_dir", self._root, error) from error

    def _make_room(self) -> None:
        for name in [*self._held]:
            if sum(self._held.values()) <= self._most:
                return
            if name.startswith(_ASIDE) or int(name.removeprefix(_STEP)) <= self._saved:
                shutil.rmtree(self._root / name)
                del self._held[name]


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


# For a checkpoint


class _LedgerFile(Exactly):
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

    def answered_again(self, positions: Collection[int], why: str) -> Self:
        """Return what is left when these groups are to be generated again, which is printed."""
        if not positions:
            return self
        write_line(sys.stdout, f"{len(positions)} prompts are answered again: {why}")
        groups = [
            one.model_copy(update={"min_version": None}) if one.position in positions else one
            for one in self.ledger.groups
        ]
        left = {position: group for position, group in self.ready.items() if position not in positions}
        return replace(self, ledger=self.ledger.model_copy(update={"groups": groups}), ready=left)
