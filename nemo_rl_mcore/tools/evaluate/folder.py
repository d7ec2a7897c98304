"""The folder of an evaluation: what it holds is of one identity; files of another one are set aside by number.

save_path/evaluation.json   the identity: weights, sampling, recipe, and the prompts of each set by their digest
          NAME.jsonl        the samples of a set, see `evaluation.samples`
          results.json      the metrics, once all sets are answered
          aside.N/          the same of another identity

Two evaluations of one identity may go on with each other's samples.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.config.base import join_path
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.hub import fetched_folder
from nemo_rl_mcore.data.strict_json import read_json
from nemo_rl_mcore.driver.own_files import next_free, replacing
from nemo_rl_mcore.errors import folder_error, shortened
from nemo_rl_mcore.rank.checkpoints import INFO_FILE, SUMS_FILE, sha256

IDENTITY_FILE = "evaluation.json"
RESULTS_FILE = "results.json"
ASIDE = "aside"
_SHOWN = 5

Tree = Mapping[str, object]


def digest_of(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 of what is asked and what is scored against, in its order."""
    whole = hashlib.sha256()
    for prompt in prompts:
        told = [prompt.literal] if prompt.literal else []
        row = json.dumps([prompt.index, prompt.text, prompt.answer, *told])
        whole.update(f"{row}\n".encode())
    return whole.hexdigest()


@contextmanager
def writing_to(folder: Path) -> Generator[None]:
    """Raise FolderError, naming the folder, for what cannot be written there."""
    try:
        yield
    except OSError as error:
        raise folder_error("eval.save_path", folder, error, "make room, or name another folder") from error


def enter(folder: Path, identity: Tree, notify: Callable[[str], None]) -> None:
    """Make the folder one of this identity; `notify` is told of files that are set aside. Raises FolderError."""
    with writing_to(folder):
        _enter(folder, json.loads(json.dumps(identity)), notify)


def _enter(folder: Path, current: Tree, notify: Callable[[str], None]) -> None:
    path = folder / IDENTITY_FILE
    try:
        saved = read_json(path)
    except FileNotFoundError:
        saved = None
    except ValueError:
        saved = "broken"
    if saved == current:
        return
    if theirs := _files(folder, saved, current):
        aside = next_free(folder / ASIDE)
        aside.mkdir()
        # The identity goes last: until then a command that is killed here begins again.
        for file in theirs:
            file.rename(aside / file.name)
        changes = list(_changes(cast("Tree", saved), current)) if isinstance(saved, dict) else []
        more = f", and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        notify(f"set aside: {aside}" + (f", of {', '.join(changes[:_SHOWN])}{more}" if changes else ""))
    write_json(path, current)


def write_json(path: Path, value: object) -> None:
    """Write a file that is whole or not there; raises OSError."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1, ensure_ascii=True, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _files(folder: Path, *identities: object) -> list[Path]:
    """Return the files of evaluations, the identity last; others, such as data or metrics, are no concern of theirs."""
    sets = [cast("Tree", one).get("sets") for one in identities if isinstance(one, dict)]
    names = dict.fromkeys(name for one in sets if isinstance(one, dict) for name in cast("Tree", one))
    found = [*(f"{name}.jsonl" for name in names), RESULTS_FILE, IDENTITY_FILE]
    return [folder / name for name in found if (folder / name).is_file()]


def _changes(was: Tree, now: Tree, prefix: str = "") -> Iterator[str]:
    for key in {**now, **was}:
        before, after, path = was.get(key), now.get(key), join_path(prefix, key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _changes(cast("Tree", before), cast("Tree", after), path)
        elif before != after:
            yield f"{path}: {shortened(json.dumps(before), 40)} (now {shortened(json.dumps(after), 40)})"


_SECTIONS = {"seed", "policy", "env", "eval", "cluster"}
_OF_THE_PLACE = ("init_checkpoint", "model_name", "tokenizer")
"""Keys of the policy that say where its weights lie, and not which they are."""

_NOT_ASKED = ("sets", "save_path", "k_values")
"""Keys of eval that say nothing of a prompt or an answer; of the sets, their prompts do."""


def identity_of(config: RunConfig, sets: Mapping[str, Sequence[Prompt]]) -> dict[str, object]:
    """Return the weights, the prompts of each set, and what of the recipe an answer and its score depend on."""
    recipe = config.model_dump(mode="json", include=_SECTIONS)
    recipe["policy"] = {
        key: value
        for key, value in recipe["policy"].items()
        if key not in _OF_THE_PLACE and not key.endswith("_timeout_s")
    }
    recipe["eval"] = {key: value for key, value in recipe["eval"].items() if key not in _NOT_ASKED}
    return {
        "weights": _weights(config),
        "sets": {name: digest_of(prompts) for name, prompts in sets.items()},
        "batch_size": config.loop.val_batch_size,
        **recipe,
    }


def _weights(config: RunConfig) -> str:
    """Of a checkpoint the checksum of its checksums; of a Hugging Face folder its files by name, size and time."""
    policy = config.policy
    if policy.init_checkpoint is not None:
        folder = Path(policy.init_checkpoint)
        sums = folder / SUMS_FILE
        return f"checkpoint {sha256(sums if sums.is_file() else folder / INFO_FILE)}"
    if policy.model_name is None:
        return "drawn at random by the seed"
    whole = hashlib.sha256()
    folder = fetched_folder(policy.model_name)
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.json"))):
        status = path.stat()
        whole.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return f"Hugging Face {whole.hexdigest()}"
