"""Save and load a run's rollouts: the ledger, and folders of groups for a checkpoint or a replay.

A checkpoint's folder `step_N/rollouts` contains `ledger.json`, with the ledger and a mark in the log, and `ready/`,
with the groups that were ready. Files are checked when they are read, and nothing in them is executed.
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
from nemo_rl_mcore.driver.rollouts.events import Count, Exactly, LogMark, Segment
from nemo_rl_mcore.driver.rollouts.ledger import SavedLedger
from nemo_rl_mcore.driver.rollouts.transcript import RESPONSES, WEIGHT_VERSIONS
from nemo_rl_mcore.errors import RefusedError, code_of, folder_error
from nemo_rl_mcore.rank.checkpoints import read_sums, require_sums, sha256, write_sums

TENSORS_FILE = "groups.safetensors"
TEXTS_FILE = "groups.json"
LEDGER_FILE = "ledger.json"
READY_FOLDER = "ready"
_STEP, _ASIDE = "step_", "aside_step_"


# Groups: a safetensors file of tensors named POSITION.KEY, a JSON file for everything else, and both files' checksums


class _Group(Exactly):
    """A group without its tensors. entries: the batch's columns in order; None for a tensor, else one value per row."""

    position: Count
    entries: dict[str, list[Any] | None]


class _Groups(Exactly):
    groups: list[_Group]


def save_groups(folder: Path, groups: Mapping[int, BatchedDataDict]) -> None:
    """Write groups, given by position, into a folder, which is created if necessary.

    Raises OSError, and ValueError, naming group and key, for a batch with values that JSON would change.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts, tensors = list[_Group](), dict[str, torch.Tensor]()
    for position, batch in groups.items():
        entries: dict[str, list[Any] | None] = {}
        for key, value in batch.items():
            if key == RESPONSES:  # decoded again when the group is read
                continue
            if isinstance(value, torch.Tensor):
                alone = value.detach().cpu().clone(memory_format=torch.contiguous_format)
                entries[key], tensors[f"{position}.{key}"] = None, alone  # shared storage is refused
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
    except SafetensorError as error:  # wraps an operating system error as text
        raise OSError(errno.EIO, str(error), str(folder / TENSORS_FILE)) from error
    (folder / TEXTS_FILE).write_text(_Groups(groups=texts).model_dump_json(), encoding="utf-8")
    write_sums(folder, {name: sha256(folder / name) for name in (TENSORS_FILE, TEXTS_FILE)})


def load_groups(folder: Path) -> dict[int, BatchedDataDict]:
    """Return a folder's groups by position, bit-identical; raise ValueError, naming the file, for damage."""
    sums = read_sums(folder)
    if sums is None:
        raise ValueError(
            f"{folder} holds no saved groups, or only a part of them: it has no list of checksums"
        )
    require_sums(folder, sums, (TENSORS_FILE, TEXTS_FILE))
    path = folder / TEXTS_FILE
    try:
        text = read_regular(path, follow_links=False)
        parse_json(text)  # stricter than pydantic: rejects duplicate keys
        texts = _Groups.model_validate_json(text).groups
        path = folder / TENSORS_FILE
        tensors = load(read_regular(path, follow_links=False))
    except (OSError, ValueError, SafetensorError) as error:
        raise RefusedError(f"{path} cannot be read: {error}", code="unreadable-file") from error
    if len({one.position for one in texts}) < len(texts):
        raise RefusedError(f"{folder / TEXTS_FILE} is broken: a group is there twice", code="group-twice")
    expected = {f"{one.position}.{key}" for one in texts for key, rows in one.entries.items() if rows is None}
    if expected != tensors.keys():
        differing = sorted(expected ^ tensors.keys())[:8]
        raise RefusedError(
            f"{folder / TENSORS_FILE} does not match {TEXTS_FILE}: {', '.join(differing)}",
            code="unequal-files",
        )
    found: dict[int, BatchedDataDict] = {}
    try:
        for one in texts:
            batch = found[one.position] = BatchedDataDict()
            for key, rows in one.entries.items():
                batch[key] = tensors[f"{one.position}.{key}"] if rows is None else rows
    except ValueError as error:
        raise RefusedError(f"{folder / TEXTS_FILE} is broken: {error}", code=code_of(error)) from error
    return found


def digest_of_group(batch: BatchedDataDict) -> str:
    """Return a hash, as 16 hexadecimal digits, of prompts, answers and log-probabilities, without padding."""
    found = hashlib.blake2b(digest_size=8)
    ids_BS = batch["input_ids"].contiguous().numpy()
    logprobs_BS = batch["generation_logprobs"].contiguous().numpy()
    for row, length in enumerate(batch["input_lengths"].tolist()):
        found.update(ids_BS[row, :length])
        found.update(logprobs_BS[row, :length])
    return found.hexdigest()


def versions_of(group: BatchedDataDict, version: int) -> list[Segment]:
    """Return a group's segments; a single one of `version` if the ranks sampled everything or nothing was sampled."""
    if WEIGHT_VERSIONS not in group:
        return [Segment(0, version)]
    versions_BS = group[WEIGHT_VERSIONS]
    nothing = torch.iinfo(versions_BS.dtype).max
    sampled_first = (versions_BS < 0).long().argsort(dim=1, stable=True)
    versions_BT = versions_BS.masked_fill(versions_BS < 0, nothing).gather(1, sampled_first)
    # For each decode step, the oldest version among all rows' tokens.
    oldest = [int(one) for one in versions_BT.amin(0).numpy()]
    return [
        Segment(first, one)
        for first, one in enumerate(oldest)
        if one != nothing and (first == 0 or one != oldest[first - 1])
    ] or [Segment(0, version)]


class GroupArchive:
    """Writes groups for a replay into `<root>/step_N`, up to a limit on total bytes.

    If there are checkpoints, a replay begins at one: the oldest steps are removed first, but steps after the last
    checkpoint are kept, whatever their size. Without checkpoints, a replay begins at the first step: no step is
    removed, and once a step does not fit, neither it nor any later step is written.

    root: folder, which is created; folders that a resume has set aside in it are removed first. most_bytes: limit on
    total bytes. checkpoints: True if the run has checkpoints. step: the last checkpoint's step; 0 for none.
    """

    def __init__(self, root: Path, most_bytes: float, *, checkpoints: bool, step: int = 0) -> None:
        self._root, self._most, self._checkpoints = root, most_bytes, checkpoints
        self._saved, self._full = step, False
        names = [path.name for path in root.iterdir()] if root.is_dir() else []
        steps = [name for name in names if name.removeprefix(_STEP).isdecimal()]
        aside = sorted(name for name in names if name.startswith(_ASIDE))
        in_order = aside + sorted(steps, key=lambda name: int(name.removeprefix(_STEP)))
        self._held = {name: _bytes(root / name) for name in in_order}
        """Each folder's size in bytes, in the order in which folders are removed."""

    def keep(self, step: int, groups: Mapping[int, BatchedDataDict]) -> None:
        """Write a finished step's groups, given by position; raise FolderError on failure."""
        if self._full:
            return
        folder = self._root / f"{_STEP}{step}"
        try:
            save_groups(folder, groups)
            self._held[folder.name] = _bytes(folder)
            self.checkpointed(self._saved)  # to free space
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
        """Remove folders beyond the limit, as a replay may now begin after this step; raise FolderError on failure."""
        self._saved = step
        try:
            for name in [*self._held]:
                if sum(self._held.values()) <= self._most:
                    return
                if name.startswith(_ASIDE) or int(name.removeprefix(_STEP)) <= step:
                    shutil.rmtree(self._root / name)
                    del self._held[name]
        except OSError as error:
            raise folder_error("logger.log_dir", self._root, error) from error


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


# For a checkpoint


class _LedgerFile(Exactly):
    ledger: SavedLedger
    log: LogMark


@dataclass(frozen=True)
class SavedRollouts:
    """A checkpoint's rollouts. log: the log's end when they were saved. ready: the READY groups, by position."""

    ledger: SavedLedger
    log: LogMark
    ready: Mapping[int, BatchedDataDict]

    def save(self, folder: Path) -> None:
        """Write the rollouts into a new folder; raise OSError, and ValueError as `save_groups` does."""
        folder.mkdir()
        text = _LedgerFile(ledger=self.ledger, log=self.log).model_dump_json()
        (folder / LEDGER_FILE).write_text(text, encoding="utf-8")
        save_groups(folder / READY_FOLDER, self.ready)

    @classmethod
    def load(cls, folder: Path, version: int) -> Self:
        """Load the files that `save` wrote into this version's checkpoint; raise ValueError, naming a damaged file."""
        path = folder / LEDGER_FILE
        try:
            file = _LedgerFile.model_validate(read_json(path, follow_links=False))
        except (OSError, ValidationError, ValueError) as error:
            raise RefusedError(
                f"{path} cannot be read: {' '.join(str(error).split())}", code="unreadable-file"
            ) from error
        ready = load_groups(folder / READY_FOLDER)
        if file.ledger.version != version or sorted(ready) != file.ledger.ready:
            raise RefusedError(f"{path} does not match the files next to it", code="unequal-files")
        return cls(file.ledger, file.log, ready)

    def answered_again(self, positions: Collection[int], why: str) -> Self:
        """Return the rollouts without the answers at these positions, and print why they are generated again."""
        if not positions:
            return self
        write_line(sys.stdout, f"{len(positions)} prompts are answered again: {why}")
        groups = [
            one.model_copy(update={"min_version": None}) if one.position in positions else one
            for one in self.ledger.groups
        ]
        left = {position: group for position, group in self.ready.items() if position not in positions}
        return replace(self, ledger=self.ledger.model_copy(update={"groups": groups}), ready=left)
