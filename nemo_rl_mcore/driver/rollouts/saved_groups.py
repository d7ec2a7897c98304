"""Groups in a folder: tensors in a safetensors file, all else in JSON, and the checksums of both.

A tensor is named POSITION.KEY. What is read is checked, and nothing in it is executed.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load, save_file  # pyright: ignore[reportUnknownVariableType]

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.strict_json import parse_json, read_regular
from nemo_rl_mcore.driver.rollouts.transcript import RESPONSES
from nemo_rl_mcore.errors import RefusedError, code_of
from nemo_rl_mcore.rank.checkpoints import read_sums, require_sums, sha256, write_sums

TENSORS_FILE = "groups.safetensors"
TEXTS_FILE = "groups.json"
_Count = Annotated[int, Field(ge=0)]


class _Group(BaseModel):
    """A group but for its tensors. entries: the keys of the batch in order; None for a tensor, or a value a row."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    position: _Count
    entries: dict[str, list[Any] | None]


class _Groups(BaseModel):
    """`groups.json`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    groups: list[_Group]


def save_groups(folder: Path, groups: Mapping[int, BatchedDataDict]) -> None:
    """Write groups by position into a folder, which is made.

    Raises ValueError, naming group and key, for a batch with values that JSON would change, and OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = _Groups(groups=[_texts(position, batch) for position, batch in groups.items()])
    try:
        save_file(_tensors(groups), folder / TENSORS_FILE)
    except SafetensorError as error:  # of the operating system, in words alone
        raise OSError(errno.EIO, str(error), str(folder / TENSORS_FILE)) from error
    (folder / TEXTS_FILE).write_text(texts.model_dump_json(), encoding="utf-8")
    write_sums(folder, {name: sha256(folder / name) for name in (TENSORS_FILE, TEXTS_FILE)})


def load_groups(folder: Path) -> dict[int, BatchedDataDict]:
    """Return the groups of a folder by position, with the same bits; raises ValueError, naming the file, for damage."""
    sums = read_sums(folder)
    if sums is None:
        raise ValueError(
            f"{folder} holds no saved groups, or only a part of them: it has no list of checksums"
        )
    require_sums(folder, sums, (TENSORS_FILE, TEXTS_FILE))
    texts, tensors = _read_texts(folder / TEXTS_FILE), _read_tensors(folder / TENSORS_FILE)
    expected = {
        _name(one.position, key) for one in texts for key, rows in one.entries.items() if rows is None
    }
    if expected != tensors.keys():
        differing = sorted(expected ^ tensors.keys())[:8]
        raise RefusedError(
            f"{folder / TENSORS_FILE} does not go with {TEXTS_FILE}: {', '.join(differing)}",
            code="unequal-files",
        )
    try:
        return {one.position: _batch(one, tensors) for one in texts}
    except ValueError as error:
        raise RefusedError(f"{folder / TEXTS_FILE} is broken: {error}", code=code_of(error)) from error


def _texts(position: int, batch: BatchedDataDict) -> _Group:
    return _Group(position=position, entries=dict(_entries(position, batch)))


def _entries(position: int, batch: BatchedDataDict) -> Iterator[tuple[str, list[Any] | None]]:
    for key, value in batch.items():
        if key == RESPONSES:  # decoded again by whoever reads the group
            continue
        if isinstance(value, torch.Tensor):
            yield key, None
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
        yield key, value


def _tensors(groups: Mapping[int, BatchedDataDict]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    storages = set[int]()
    for position, batch in groups.items():
        for key, value in batch.items():
            if not isinstance(value, torch.Tensor):
                continue
            tensor = value.detach().cpu().contiguous()
            storage = tensor.untyped_storage().data_ptr()
            # A file has each tensor on its own; two of one storage are refused.
            found[_name(position, key)] = tensor.clone() if storage in storages else tensor
            storages.add(storage)
    return found


def _name(position: int, key: str) -> str:
    return f"{position}.{key}"


def _read_texts(path: Path) -> list[_Group]:
    try:
        text = read_regular(path, follow_links=False)
        parse_json(text)  # stricter than what follows: a key that is there twice is damage, too
        groups = _Groups.model_validate_json(text).groups
    except (OSError, ValueError) as error:
        raise RefusedError(f"{path} cannot be read: {error}", code="unreadable-file") from error
    positions = [one.position for one in groups]
    if len({*positions}) < len(positions):
        raise RefusedError(f"{path} is broken: a group is there twice", code="group-twice")
    return groups


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load(read_regular(path, follow_links=False))
    except (OSError, SafetensorError) as error:
        raise RefusedError(f"{path} cannot be read: {error}", code="unreadable-file") from error


def _batch(texts: _Group, tensors: Mapping[str, torch.Tensor]) -> BatchedDataDict:
    return BatchedDataDict(
        {
            key: tensors[_name(texts.position, key)] if rows is None else rows
            for key, rows in texts.entries.items()
        }
    )
