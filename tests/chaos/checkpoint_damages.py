"""What may happen to the files of a checkpoint: by accident, and by someone who wants code of theirs to run."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

Change = Callable[[Path], None]
DEEP = "[" * 200_000


@dataclass(frozen=True)
class Damage:
    """files: the paths inside of the checkpoint of which an error must name one."""

    name: str
    files: tuple[str, ...]
    change: Change


@dataclass(frozen=True)
class Attack:
    """change: given the place of a file, it makes loading create that file, or worse."""

    name: str
    change: Callable[[Path, Path], None]


# Accidents


def damages(step: Path) -> Iterator[Damage]:
    """Every damage of every file of a checkpoint that stands in the folder."""
    files = sorted(str(path.relative_to(step)) for path in step.rglob("*") if path.is_file())
    for file in files:
        size = (step / file).stat().st_size
        for name, change in _OF_ANY_FILE.items():
            yield Damage(f"{file} {name}", (file,), _at(file, change))
        for place in sorted({0, size // 5, size // 3, size // 2, 3 * size // 4, size - 1}):
            for bit in (0, 6):
                yield Damage(
                    f"{file} bit {bit} of byte {place}", (file,), _at(file, partial(_flip, place, bit))
                )
        if file.endswith(".json"):
            for name, text in _OF_JSON.items():
                yield Damage(f"{file} {name}", (file,), _at(file, partial(_write, text)))
    for one, other in _SWAPPED:
        yield Damage(f"{one} <-> {other}", (one, other), partial(_swap, one, other))
    for key, value in _STATES:
        change = partial(_set, "policy/state.json", key, value)
        yield Damage(f"state.json {key} = {str(value)[:20]}", ("policy/state.json",), change)
    for key, value in _INFOS:
        change = partial(_set, "training_info.json", key, value)
        yield Damage(f"training_info.json {key} = {str(value)[:20]}", ("training_info.json",), change)


def _at(file: str, change: Change) -> Change:
    return lambda step: change(step / file)


def _write(text: str, path: Path) -> None:
    path.write_text(text)


def _flip(place: int, bit: int, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def _cut(share: float, path: Path) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def _grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _zero_out(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _to_link(path: Path) -> None:
    elsewhere = Path(tempfile.mkdtemp(), path.name)
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def _to_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere")


def _swap(one: str, other: str, step: Path) -> None:
    (step / one).rename(step / "swapped")
    (step / other).rename(step / one)
    (step / "swapped").rename(step / other)


def _set(file: str, key: str, value: Any, step: Path) -> None:
    content = json.loads((step / file).read_text())
    content[key] = value
    (step / file).write_text(json.dumps(content))


_OF_ANY_FILE: dict[str, Change] = {
    "deleted": Path.unlink,
    "emptied": partial(_cut, 0.0),
    "cut in half": partial(_cut, 0.5),
    "without its end": partial(_cut, 0.999),
    "one byte longer": _grow,
    "all zero": _zero_out,
    "a pipe": _to_pipe,
    "a folder": _to_folder,
    "a link": _to_link,
    "a dangling link": _to_dangling_link,
}
_OF_JSON = {
    "deep": DEEP,
    "deep object": '{"a":' * 200_000,
    "a list": "[]",
    "a number": "5",
    "null": "null",
    "twice the same key": '{"step": 1, "step": 2}',
    "a NaN": '{"step": NaN}',
    "a long key": json.dumps({"k" * 5_000_000: 1}),
}
_SWAPPED = (
    ("policy/weights/__0_0.distcp", "policy/reference/__0_0.distcp"),
    ("policy/weights/.metadata", "policy/optimizer/.metadata"),
    ("policy/weights", "policy/reference"),
    ("policy/optimizer", "policy/weights"),
    ("policy/state.json", "policy/weights/metadata.json"),
)
_STATES = (
    ("optimizer_step", "1"),
    ("optimizer_step", -1),
    ("optimizer_step", 1e400),
    ("optimizer_step", None),
    ("schedule_samples", 1.5),
    ("schedule_samples", -8),
    ("layout", []),
    ("layout", {"ranks": "1"}),
    ("committed_step_ids", "x"),
    ("committed_step_ids", [1]),
    ("unknown", 1),
)
_INFOS = (
    ("step", "1"),
    ("step", -1),
    ("metrics", []),
    ("counters", {"total": []}),
    ("files", {"/etc/hostname": 1}),
    ("files", {"../../outside": 1}),
    ("files", []),
    ("checksums", 5),
    ("unknown", 1),
)


# Attacks


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, trap: Path):
        self.trap = trap

    def __reduce__(self):
        return Path.touch, (self.trap,)


class Evaluated(Payload):
    """The same by way of eval."""

    def __reduce__(self):
        return eval, (f"open({str(self.trap)!r}, 'w').close()",)


class ByHand(Payload):
    """The same by way of os.system."""

    def __reduce__(self):
        return os.system, (f"touch {self.trap}",)


def attacks() -> Iterator[Attack]:
    """Those on each sharded folder, and those on the other files."""
    for part in ("weights", "optimizer", "reference"):
        folder = f"policy/{part}"
        for name, change in _ON_SHARDED.items():
            yield Attack(f"{folder} {name}", partial(_in_folder, folder, change))
    for name, change in _ON_OTHERS.items():
        yield Attack(name, change)


def _in_folder(folder: str, change: Callable[[Path, Path], None], step: Path, trap: Path) -> None:
    change(step / folder, trap)


def _metadata(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def _replaced(make: Callable[[Path], Any]) -> Callable[[Path, Path], None]:
    def change(folder: Path, trap: Path) -> None:
        (folder / ".metadata").write_bytes(pickle.dumps(make(trap)))

    return change


def _edited(
    edit: Callable[[Any, Any], None], payload: type[Payload] = Payload
) -> Callable[[Path, Path], None]:
    def change(folder: Path, trap: Path) -> None:
        metadata = _metadata(folder)
        edit(metadata, payload(trap))
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return change


def _first_place(metadata: Any) -> Any:
    return next(
        place
        for index, place in metadata.storage_data.items()
        if not isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata)
    )


def _with_own_metadata_of_the_rank(folder: Path, trap: Path) -> None:
    """torch reads `__0.metadata`, without a limit, when `.metadata` makes it fail."""
    _edited(lambda metadata, _: setattr(metadata, "storage_meta", 5))(folder, trap)
    (folder / "__0.metadata").write_bytes(pickle.dumps(Payload(trap)))


def _with_common_pt(folder: Path, trap: Path) -> None:
    torch.save({"args": Payload(trap)}, folder / "common.pt")


def _entry_replaced(of_bytes: bool) -> Callable[[Path, Path], None]:
    def change(folder: Path, trap: Path) -> None:
        metadata, file = _metadata(folder), folder / "__0_0.distcp"
        written = io.BytesIO()
        torch.save([Payload(trap)], written)
        for index, place in metadata.storage_data.items():
            if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata) is of_bytes:
                place.offset, place.length = file.stat().st_size, len(written.getvalue())
        file.write_bytes(file.read_bytes() + written.getvalue())
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return change


def _outside(path: Callable[[Path], str]) -> Callable[[Path, Path], None]:
    def change(folder: Path, trap: Path) -> None:
        outside = trap.with_name("outside.distcp")
        torch.save([Payload(trap)], outside)
        metadata = _metadata(folder)
        _first_place(metadata).relative_path = path(outside)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return change


def _as_link(folder: Path, trap: Path) -> None:
    outside = trap.with_name("outside.metadata")
    outside.write_bytes(pickle.dumps(Payload(trap)))
    (folder / ".metadata").unlink()
    (folder / ".metadata").symlink_to(outside)


def _behind_a_sound_one(folder: Path, trap: Path) -> None:
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:-1] + b"0" + pickle.dumps(Payload(trap))[2:])


def _pickled(content: bytes) -> Callable[[Path, Path], None]:
    return lambda folder, _trap: (folder / ".metadata").write_bytes(content) and None


def _size_bomb(folder: Path, trap: Path) -> None:
    metadata = _metadata(folder)
    place = _first_place(metadata)
    place.offset, place.length = 2**62, 2**62
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _list_bomb(folder: Path, trap: Path) -> None:
    """One list of parts, shared by many tensors."""
    metadata = _metadata(folder)
    tensors = metadata.state_dict_metadata
    entry = next(one for one in tensors.values() if hasattr(one, "chunks"))
    entry.chunks *= 20_000
    tensors.update({f"t{number}": entry for number in range(20_000)})
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


_ON_SHARDED: dict[str, Callable[[Path, Path], None]] = {
    "payload in place of .metadata": _replaced(Payload),
    "eval in place of .metadata": _replaced(Evaluated),
    "os.system in place of .metadata": _replaced(ByHand),
    "payload in an old protocol": lambda folder, trap: (
        (folder / ".metadata").write_bytes(pickle.dumps(ByHand(trap), protocol=0)),
        None,
    )[1],
    "payload as planner_data": _edited(lambda m, p: setattr(m, "planner_data", p)),
    "payload as storage_meta": _edited(lambda m, p: setattr(m, "storage_meta", p)),
    "payload as a tensor's description": _edited(lambda m, p: m.state_dict_metadata.update(x=p), ByHand),
    "payload as a place": _edited(lambda m, p: m.storage_data.update({MetadataIndex("x"): p})),
    "payload as an attribute": _edited(lambda m, p: setattr(m, "mcore_data", p), Evaluated),
    "payload behind a sound description": _behind_a_sound_one,
    "__0.metadata": _with_own_metadata_of_the_rank,
    "common.pt": _with_common_pt,
    "payload as common state": _entry_replaced(of_bytes=True),
    "payload as tensors": _entry_replaced(of_bytes=False),
    "a path that climbs": _outside(lambda outside: os.path.relpath(outside, "/x/y/z/policy/weights")),
    "an absolute path": _outside(str),
    ".metadata as a link": _as_link,
    # BUILD on a class sets attributes of the class, for the rest of the process.
    "a class changed": _pickled(
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x08trapped\x88s\x86b."
    ),
    "memo bomb": _pickled(b"\x80\x04Nr\xff\xff\xff\xff."),
    "hash bomb": _pickled(b"\x80\x04})" + b"\x85" * 3_000_000 + b"Ns."),
    "size bomb": _size_bomb,
    "list bomb": _list_bomb,
}


def _random_by(save: Callable[[Any, Path], None]) -> Callable[[Path, Path], None]:
    return lambda step, trap: save(Payload(trap), step / "policy" / "random" / "rank_0.pt")


def _as_tar(payload: Any, path: Path) -> None:
    """torch's oldest format."""
    with tarfile.open(path, "w") as archive:
        content = pickle.dumps(payload)
        entry = tarfile.TarInfo("sys_info")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))


def _as_plain_pickle(payload: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(payload))


def _yaml(text: str) -> Callable[[Path, Path], None]:
    return lambda step, trap: (step / "config.yaml").write_text(text.format(trap=trap)) and None


def _remote_code(step: Path, trap: Path) -> None:
    folder = step / "tokenizer"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(f"open({str(trap)!r}, 'w')\nclass Own: pass\n")


def _template(step: Path, trap: Path) -> None:
    escape = "{{ cycler.__init__.__globals__.os.system('touch TRAP') }}"
    (step / "tokenizer" / "chat_template.jinja").write_text(escape.replace("TRAP", str(trap)))


def _as_pickle(file: str) -> Callable[[Path, Path], None]:
    return lambda step, trap: (step / file).write_bytes(pickle.dumps(Payload(trap))) and None


_BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} {{k: *{chr(97 + i)}, l: *{chr(97 + i)}}}\n" for i in range(24)
)
_ON_OTHERS: dict[str, Callable[[Path, Path], None]] = {
    "random: torch.save": _random_by(torch.save),
    "random: old torch.save": _random_by(partial(torch.save, _use_new_zipfile_serialization=False)),
    "random: tar": _random_by(_as_tar),
    "random: plain pickle": _random_by(_as_plain_pickle),
    "state.json as a pickle": _as_pickle("policy/state.json"),
    "training_info.json as a pickle": _as_pickle("training_info.json"),
    "config.yaml: python/object/apply": _yaml("grpo: !!python/object/apply:os.system ['touch {trap}']\n"),
    "config.yaml: python/object/new": _yaml("grpo: !!python/object/new:pathlib.Path.touch [{trap}]\n"),
    "config.yaml: a parent elsewhere": _yaml("defaults: /etc/hostname\n"),
    "config.yaml: references": lambda step, trap: (step / "config.yaml").write_text(_BOMB) and None,
    "config.yaml: deep": lambda step, trap: (step / "config.yaml").write_text("[" * 20_000) and None,
    "tokenizer: remote code": _remote_code,
    "tokenizer: template": _template,
}


def copy_of(step: Path, target: Path) -> Path:
    """A copy to damage, in place of the last one."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(step, target)
    return target
