"""What an offline run of Weights & Biases wrote: records in blocks, as LevelDB's log has them."""

import json
from pathlib import Path

_BLOCK, _HEADER, _START = 32768, 7, 7
_WHOLE, _LAST = 1, 4


def records(folder: Path) -> list:
    """The records of an `offline-run-*` folder, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("run-*.wandb")
    data, at, part, found = file.read_bytes(), _START, b"", []
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + _HEADER : at + _HEADER + size]
        at += _HEADER + size
        if kind in (_WHOLE, _LAST):
            found.append(Record.FromString(part))
            part = b""
    return found


def run_of(folder: Path):
    (run,) = [record.run for record in records(folder) if record.HasField("run")]
    return run


def config_of(folder: Path) -> dict:
    return {item.key: json.loads(item.value_json) for item in run_of(folder).config.update}


def rows_of(folder: Path) -> list[dict]:
    """Its rows, without those fields that wandb adds to each."""
    history = [record.history for record in records(folder) if record.HasField("history")]
    items = [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item} for row in history]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in items]


def exit_code_of(folder: Path) -> int:
    (code,) = [record.exit.exit_code for record in records(folder) if record.HasField("exit")]
    return code
