"""Everything that may happen to a checkpoint's files, by accident or by someone who wants code of theirs to run.

A damage must end as a ValueError that names folder and file, or change nothing. It is tried as a run goes on (whole),
by hand (the policy's folder alone), and by hand without checksums, as those of older versions: there what a number has
become cannot be noticed. The payload of an attack must not run; whoever attacks writes the right checksums.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import signal
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tiny
import torch
import worker_state
from chat_tokenizer import save_chat_tokenizer
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from nemo_rl_mcore.config.base import ConfigError
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.driver.checkpoints import CheckpointStore, read_checkpoint
from nemo_rl_mcore.driver.run_folder import recipe_text
from nemo_rl_mcore.rank.checkpoints import POLICY_FOLDER, SUMS_FILE, sha256, write_sums
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check.given_weights import load_recipe_of

RECIPE = Path(__file__).parents[2] / "examples/configs/grpo_copy_cpu.yaml"
DEADLINE_S = 30.0
DEEP = "[" * 200_000
Change = Callable[[Path], None]
Poison = Callable[[Path, Path], None]
"""Given the checkpoint, or a folder of it, and the place of a file: it makes loading create that file, or worse."""


@dataclass(frozen=True)
class Case:
    """files: the paths inside of the checkpoint of which an error must name one."""

    name: str
    change: Callable[..., None]
    files: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Finding:
    """What came of a case. verdict: refused, the same, another state (unverified only), or wrong."""

    case: str
    way: str
    verdict: str
    why: str = ""


def run(root: Path, every: int = 1) -> tuple[list[Finding], list[Finding]]:
    """Each `every`-th damage and attack, on this rank alone, in the folder."""
    worker = tiny.worker(tiny.policy_config())
    worker.train(tiny.grpo_batch(seed=1), tiny.grpo_loss())
    store = CheckpointStore(root / "checkpoints")
    folder = store.begin(1)
    (folder / "config.yaml").write_text(recipe_text(load_config(RECIPE)))
    save_chat_tokenizer(folder / "tokenizer")
    worker.save_checkpoint(str(folder / "policy"))
    store.commit(1, {"train/reward": 0.5}, {"total": 1})
    harness = _Harness(worker, root / "checkpoints/step_1", root / "copy")
    return [*harness.damage(every)], [*harness.attack(every)]


class _Harness:
    def __init__(self, worker: Any, step: Path, copy: Path) -> None:
        self._worker, self._step, self._copy = worker, step, copy
        worker.load_checkpoint(str(step / "policy"))  # clears gradients
        self._wanted = self._lasting()

    def damage(self, every: int) -> Iterator[Finding]:
        for case in [*damages(self._step)][::every]:
            for way in ("whole", "by hand", "unverified"):
                if way == "whole" or case.files[0].startswith("policy/"):
                    case.change(self._copied())
                    yield self._try(case, way)

    def attack(self, every: int) -> Iterator[Finding]:
        trap = self._copy.with_name("trapped")
        for case in [*attacks()][::every]:
            for way in ("whole", "unverified"):
                case.change(self._copied(), trap)
                _sum_up(self._copy)
                found = self._try(case, way)
                if trap.exists():
                    trap.unlink()
                    found = Finding(case.name, way, "wrong", "the payload ran")
                yield found

    def _copied(self) -> Path:
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._step, self._copy)
        return self._copy

    def _try(self, case: Case, way: str) -> Finding:
        self._spoil()
        try:
            with _deadline():
                if way == "whole":
                    self._go_on()
                else:
                    self._by_hand(verify=way == "by hand")
        except ValueError as error:
            verdict = _judged(str(error), [self._copy / file for file in case.files])
            return Finding(case.name, way, *verdict)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is shown
            return Finding(case.name, way, "wrong", f"{type(error).__name__}: {str(error)[:200]}")
        if worker_state.differences(self._wanted, self._lasting()):
            verdict = "another state" if way == "unverified" else "wrong"
            return Finding(case.name, way, verdict, "loaded into another state")
        return Finding(case.name, way, "the same")

    def _go_on(self) -> None:
        """As a run goes on, or generates."""
        checkpoint = read_checkpoint(self._copy)
        try:
            load_recipe_of(self._copy)
        except ConfigError as error:
            raise ValueError(f"{self._copy / 'config.yaml'}: {error}") from error
        try:
            tokenizer = load_tokenizer(str(self._copy / "tokenizer"))
            tokenizer.render_chat([Message("user", "a")], add_generation_prompt=True)
        except ValueError as error:
            raise ValueError(f"{self._copy / 'tokenizer'}: {error}") from error
        self._worker.load_checkpoint(str(checkpoint.folder / POLICY_FOLDER))

    def _by_hand(self, *, verify: bool) -> None:
        self._worker.backend._verify_checksums = verify
        try:
            self._worker.load_checkpoint(str(self._copy / "policy"))
        finally:
            self._worker.backend._verify_checksums = True

    def _spoil(self) -> None:
        """Change what a checkpoint sets back, so that one that sets nothing back is not taken for the same."""
        with torch.no_grad():
            for tensor in worker_state._tensors(self._worker).values():
                if tensor.is_floating_point():
                    tensor.add_(1.0)
        torch.rand(3)
        self._worker.backend.scheduler.num_steps = 0

    def _lasting(self) -> dict[str, Any]:
        found = worker_state.capture(self._worker)
        return {key: found[key] for key in found if not key.startswith("gradient") and key != "config"}


def _judged(message: str, files: list[Path]) -> tuple[str, str]:
    """Whether an error names the file (or, of an attack, one in the folder), in a message that can be read."""
    named = [
        *files,
        *(file.parent for file in files if file.name == ".metadata"),
    ]  # it describes those beside it
    if not any(str(file) in message for file in named):
        return "wrong", f"does not name {files[0].name}: {message[:300]}"
    if len(message) > 2000:
        return "wrong", f"{len(message)} characters long"
    return "refused", ""


def _sum_up(step: Path) -> None:
    policy = step / "policy"
    files = [path for path in policy.rglob("*") if path.is_file() and path.name != SUMS_FILE]
    write_sums(policy, {str(path.relative_to(policy)): sha256(path) for path in files})
    info, path = None, step / "training_info.json"
    own = [one for one in step.rglob("*") if one.is_file() and one != path and one != step / SUMS_FILE]
    try:
        info = json.loads(path.read_bytes())
        info["files"] = {str(one.relative_to(step)): one.lstat().st_size for one in own}
        path.write_text(json.dumps(info))
    except ValueError:
        pass  # it is what was attacked
    write_sums(step, {str(one.relative_to(step)): sha256(one) for one in (*own, path)})


@contextmanager
def _deadline() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError(f"it hangs for {DEADLINE_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Accidents


def damages(step: Path) -> Iterator[Case]:
    files = sorted(str(path.relative_to(step)) for path in step.rglob("*") if path.is_file())
    for file in files:
        size, changes = (step / file).stat().st_size, {**_OF_ANY_FILE}
        for place in sorted({0, size // 5, size // 3, size // 2, 3 * size // 4, size - 1}):
            for bit in (0, 6):
                changes[f"bit {bit} of byte {place}"] = partial(_flip, place, bit)
        for name, text in _OF_JSON.items() if file.endswith(".json") else ():
            changes[name] = lambda path, text=text: path.write_text(text)
        yield from (Case(f"{file} {name}", _at(file, change), (file,)) for name, change in changes.items())
    for one, other in _SWAPPED:
        yield Case(f"{one} <-> {other}", partial(_swap, one, other), (one, other))
    for file, values in _VALUES.items():
        for key, value in values:
            yield Case(f"{file} {key} = {str(value)[:20]}", partial(_set, file, key, value), (file,))


def _at(file: str, change: Change) -> Change:
    return lambda step: change(step / file)


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
_VALUES: dict[str, tuple[tuple[str, Any], ...]] = {
    "policy/state.json": (
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
    ),
    "training_info.json": (
        ("step", "1"),
        ("step", -1),
        ("metrics", []),
        ("counters", {"total": []}),
        ("files", {"/etc/hostname": 1}),
        ("files", {"../../outside": 1}),
        ("files", []),
        ("checksums", 5),
        ("unknown", 1),
    ),
}


# Attacks


class Payload:
    """Calls a function when it is unpickled."""

    def __init__(self, *called: Any) -> None:
        self._called = called

    def __reduce__(self) -> tuple[Any, ...]:
        return self._called[0], self._called[1:]


def touched(trap: Path) -> Payload:
    return Payload(Path.touch, trap)


def evaluated(trap: Path) -> Payload:
    return Payload(eval, f"open({str(trap)!r}, 'w').close()")


def by_hand(trap: Path) -> Payload:
    return Payload(os.system, f"touch {trap}")


def attacks() -> Iterator[Case]:
    """Those on each sharded folder, and those on the other files."""
    for folder in ("policy/weights", "policy/optimizer", "policy/reference"):
        for name, poison in _ON_SHARDED.items():
            yield Case(f"{folder} {name}", partial(_in_folder, folder, poison))
    yield from (Case(name, poison) for name, poison in _ON_OTHERS.items())


def _in_folder(folder: str, poison: Poison, step: Path, trap: Path) -> None:
    poison(step / folder, trap)


@contextmanager
def _metadata(folder: Path) -> Iterator[Any]:
    """What describes the folder, to be changed in place."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    yield metadata
    path.write_bytes(pickle.dumps(metadata))


def _replaced(make: Callable[[Path], Any], folder: Path, trap: Path, protocol: int | None = None) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(make(trap), protocol))


def _pickled(content: bytes, folder: Path, _trap: Path) -> None:
    (folder / ".metadata").write_bytes(content)


def _edited(edit: Callable[[Any, Any], None], folder: Path, trap: Path, make: Any = touched) -> None:
    with _metadata(folder) as metadata:
        edit(metadata, make(trap))


def _first_place(metadata: Any) -> Any:
    return next(
        place
        for index, place in metadata.storage_data.items()
        if not isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata)
    )


def _with_own_metadata_of_the_rank(folder: Path, trap: Path) -> None:
    """torch reads `__0.metadata`, without a limit, when `.metadata` makes it fail."""
    with _metadata(folder) as metadata:
        metadata.storage_meta = 5
    (folder / "__0.metadata").write_bytes(pickle.dumps(touched(trap)))


def _entry_replaced(of_bytes: bool, folder: Path, trap: Path) -> None:
    file, written = folder / "__0_0.distcp", io.BytesIO()
    torch.save([touched(trap)], written)
    with _metadata(folder) as metadata:
        for index, place in metadata.storage_data.items():
            if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata) is of_bytes:
                place.offset, place.length = file.stat().st_size, len(written.getvalue())
    file.write_bytes(file.read_bytes() + written.getvalue())


def _outside(path: Callable[[Path], str], folder: Path, trap: Path) -> None:
    outside = trap.with_name("outside.distcp")
    torch.save([touched(trap)], outside)
    with _metadata(folder) as metadata:
        _first_place(metadata).relative_path = path(outside)


def _as_link(folder: Path, trap: Path) -> None:
    outside = trap.with_name("outside.metadata")
    outside.write_bytes(pickle.dumps(touched(trap)))
    (folder / ".metadata").unlink()
    (folder / ".metadata").symlink_to(outside)


def _behind_a_sound_one(folder: Path, trap: Path) -> None:
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:-1] + b"0" + pickle.dumps(touched(trap))[2:])


def _size_bomb(folder: Path, _trap: Path) -> None:
    with _metadata(folder) as metadata:
        place = _first_place(metadata)
        place.offset, place.length = 2**62, 2**62


def _list_bomb(folder: Path, _trap: Path) -> None:
    """One list of parts, shared by many tensors."""
    with _metadata(folder) as metadata:
        tensors = metadata.state_dict_metadata
        entry = next(one for one in tensors.values() if hasattr(one, "chunks"))
        entry.chunks *= 20_000
        tensors.update({f"t{number}": entry for number in range(20_000)})


_ON_SHARDED: dict[str, Poison] = {
    "payload in place of .metadata": partial(_replaced, touched),
    "eval in place of .metadata": partial(_replaced, evaluated),
    "os.system in place of .metadata": partial(_replaced, by_hand),
    "payload in an old protocol": partial(_replaced, by_hand, protocol=0),
    "payload as planner_data": partial(_edited, lambda m, p: setattr(m, "planner_data", p)),
    "payload as storage_meta": partial(_edited, lambda m, p: setattr(m, "storage_meta", p)),
    "payload as a tensor's description": partial(
        _edited, lambda m, p: m.state_dict_metadata.update(x=p), make=by_hand
    ),
    "payload as a place": partial(_edited, lambda m, p: m.storage_data.update({MetadataIndex("x"): p})),
    "payload as an attribute": partial(_edited, lambda m, p: setattr(m, "mcore_data", p), make=evaluated),
    "payload behind a sound description": _behind_a_sound_one,
    "__0.metadata": _with_own_metadata_of_the_rank,
    "common.pt": lambda folder, trap: torch.save({"args": touched(trap)}, folder / "common.pt"),
    "payload as common state": partial(_entry_replaced, True),
    "payload as tensors": partial(_entry_replaced, False),
    "a path that climbs": partial(
        _outside, lambda outside: os.path.relpath(outside, "/x/y/z/policy/weights")
    ),
    "an absolute path": partial(_outside, str),
    ".metadata as a link": _as_link,
    # BUILD on a class sets attributes of the class, for the rest of the process.
    "a class changed": partial(
        _pickled, b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x08trapped\x88s\x86b."
    ),
    "memo bomb": partial(_pickled, b"\x80\x04Nr\xff\xff\xff\xff."),
    "hash bomb": partial(_pickled, b"\x80\x04})" + b"\x85" * 3_000_000 + b"Ns."),
    "size bomb": _size_bomb,
    "list bomb": _list_bomb,
}


def _random_by(save: Callable[[Any, Path], None], step: Path, trap: Path) -> None:
    save(touched(trap), step / "policy/random/rank_0.pt")


def _as_tar(payload: Any, path: Path) -> None:
    """torch's oldest format."""
    with tarfile.open(path, "w") as archive:
        content = pickle.dumps(payload)
        entry = tarfile.TarInfo("sys_info")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))


def _as_pickle(file: str, step: Path, trap: Path) -> None:
    (step / file).write_bytes(pickle.dumps(touched(trap)))


def _recipe(text: str, step: Path, trap: Path) -> None:
    (step / "config.yaml").write_text(text.replace("TRAP", str(trap)))


def _remote_code(step: Path, trap: Path) -> None:
    folder = step / "tokenizer"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(f"open({str(trap)!r}, 'w')\nclass Own: pass\n")


def _template(step: Path, trap: Path) -> None:
    escape = "{{ cycler.__init__.__globals__.os.system('touch TRAP') }}"
    (step / "tokenizer" / "chat_template.jinja").write_text(escape.replace("TRAP", str(trap)))


_BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} {{k: *{chr(97 + i)}, l: *{chr(97 + i)}}}\n" for i in range(24)
)
_ON_OTHERS: dict[str, Poison] = {
    "random: torch.save": partial(_random_by, torch.save),
    "random: old torch.save": partial(_random_by, partial(torch.save, _use_new_zipfile_serialization=False)),
    "random: tar": partial(_random_by, _as_tar),
    "random: plain pickle": partial(_as_pickle, "policy/random/rank_0.pt"),
    "state.json as a pickle": partial(_as_pickle, "policy/state.json"),
    "training_info.json as a pickle": partial(_as_pickle, "training_info.json"),
    "config.yaml: python/object/apply": partial(
        _recipe, "grpo: !!python/object/apply:os.system ['touch TRAP']\n"
    ),
    "config.yaml: python/object/new": partial(
        _recipe, "grpo: !!python/object/new:pathlib.Path.touch [TRAP]\n"
    ),
    "config.yaml: a parent elsewhere": partial(_recipe, "defaults: /etc/hostname\n"),
    "config.yaml: references": partial(_recipe, _BOMB),
    "config.yaml: deep": partial(_recipe, "[" * 20_000),
    "tokenizer: remote code": _remote_code,
    "tokenizer: template": _template,
}
