"""The samples of a set on disk: a JSON object a line, in the order of prompts and samples, whole batches at a time.

A batch is what the engine is asked together. Rounding may depend on what stands beside a row, so that an evaluation
that goes on asks the same batches: of one that was half written nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from pydantic import TypeAdapter

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.hub import fetched_folder
from nemo_rl_mcore.data.strict_json import parse_json, read_json
from nemo_rl_mcore.driver.run_folder import leaves, next_free, open_own, open_to_append, replacing
from nemo_rl_mcore.errors import folder_error
from nemo_rl_mcore.rank.checkpoints import INFO_FILE, SUMS_FILE, sha256
from nemo_rl_mcore.tools.evaluate.metrics import Scored

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
        was, now = (
            dict(leaves(cast("dict[str, object]", one))) if isinstance(one, dict) else {}
            for one in (saved, current)
        )
        others = [path for path in {**now, **was} if was and was.get(path) != now.get(path)]
        notify(f"set aside: {aside}" + (f", of another {', '.join(others[:_SHOWN])}" if others else ""))
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


@dataclass(frozen=True)
class SampleRow:
    """A line.

    index: of the prompt in its set; sample: which of its answers. answer: what the environment reads of the response,
    None where it reads nothing. gold: the answer of the data. tokens, finished, vote: see `Scored`.
    """

    index: int
    sample: int
    prompt: str
    response: str
    reward: float
    answer: str | None
    gold: str
    tokens: int
    finished: bool
    vote: int | None

    @property
    def scored(self) -> Scored:
        """Return what metrics read of it."""
        return Scored(self.reward, self.tokens, self.finished, self.vote)


_ROW = TypeAdapter(SampleRow)


@dataclass
class SampleFile:
    """The file of a set.

    keys: index and sample of every row to come; rows: how many of them each batch has.
    """

    path: Path
    keys: Sequence[tuple[int, int]]
    rows: Sequence[int]

    def go_on(self) -> list[SampleRow]:
        """Return the rows of the whole batches that are there; what stands after them is cut off. Raises OSError."""
        os.close(open_own(self.path, os.O_RDWR))
        content = self.path.read_bytes()
        found: list[SampleRow] = []
        ends = [0]
        for line, key in zip(content.split(b"\n")[:-1], self.keys, strict=False):
            row = _read(line)
            if row is None or (row.index, row.sample) != key:
                break
            found.append(row)
            ends.append(ends[-1] + len(line) + 1)
        kept = 0
        for size in self.rows:
            if kept + size > len(found):
                break
            kept += size
        if ends[kept] < len(content):
            os.truncate(self.path, ends[kept])
        return found[:kept]

    def append(self, rows: Sequence[SampleRow]) -> None:
        """Bring the rows of a batch to disk; raises OSError."""
        text = "".join(f"{json.dumps(asdict(row), ensure_ascii=False, allow_nan=False)}\n" for row in rows)
        with open_to_append(self.path, buffering=-1) as file:
            # A tokenizer may decode half of a character, which is no UTF-8.
            file.write(text.encode(errors="backslashreplace"))
            file.flush()
            os.fsync(file.fileno())


def _read(line: bytes) -> SampleRow | None:
    try:
        return _ROW.validate_python(parse_json(line))
    except ValueError:
        return None
