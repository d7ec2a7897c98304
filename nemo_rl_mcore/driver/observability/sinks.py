"""The files of a run's metrics and answers, step by step, and a warning of equal rewards.

`metrics.jsonl`; `rollouts/step_N.jsonl.gz`, and `rollouts/validation/step_N.jsonl.gz`.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NotRequired, TypedDict

from nemo_rl_mcore.config.logger import RolloutsConfig
from nemo_rl_mcore.data.strict_json import open_regular
from nemo_rl_mcore.driver.run_folder import TEMPORARY, next_free, open_to_append, replacing
from nemo_rl_mcore.errors import RefusedError

ROLLOUTS_FOLDER = "rollouts"
VALIDATION_FOLDER = "validation"

_NAME = re.compile(r"step_(\d+)\.jsonl\.gz")
_KEPT_ONE_IN = 10
_GIB = 1 << 30
_MOST_BYTES = 10 * _GIB
# Higher levels take several times as long, for files that are hardly smaller.
_COMPRESSION = 1


class TurnRecord(TypedDict):
    """An answer or an observation, by its role; reward: of an answer that was replied to."""

    role: str
    content: str
    reward: NotRequired[float]


class TokenTable(TypedDict):
    """What is known of each of N tokens, from the first sampled one on to the end of the row.

    text: joined, that of the answer. turn: from 1 on, 0 for one that was not sampled. mask: 1 for one that is trained
    on; None in a validation. The others have 4 decimals, None where no token was sampled or the number is not finite,
    and are None as a whole where the algorithm has none, or only the ranks have seen them.
    """

    text: list[str]
    turn: list[int]
    mask: list[int] | None
    generation_logprobs: list[float | None] | None
    prev_logprobs: list[float | None] | None
    advantages: list[float | None] | None


@dataclass(frozen=True)
class Sample:
    """One response, and what became of it.

    source: the name of the prompt's source, where there are several. reward: of the environment. shaped_reward: what
    the advantages are made of. rewards: the parts of the reward that have names, before their weights; None where none
    has. advantage: the mean over the response's tokens, and advantage_first that of its first
    one; None where the algorithm has none. sample_mask: 0 for a response that taught nothing, None for one of a
    validation. Weight versions: the steps after which the weights were that sampled the oldest and the newest token.
    turns: where there may be several, all that was said after the prompt. tokens: of the first answers of a step.
    """

    step: int
    prompt_index: int
    sample_index: int
    prompt: str
    answer: str
    response: str
    source: str
    reward: float
    shaped_reward: float
    prompt_tokens: int
    response_tokens: int
    truncated: bool
    weight_version_min: int
    weight_version_max: int
    sample_mask: float | None = None
    advantage: float | None = None
    advantage_first: float | None = None
    rewards: dict[str, float | None] | None = None
    turns: list[TurnRecord] | None = None
    tokens: TokenTable | None = None

    @property
    def of_validation(self) -> bool:
        return self.sample_mask is None


class RolloutSink:
    """Writes the answers of each step, in whole files.

    Files that an earlier run left are put aside in a folder `rollouts.1`, or the next free number; a resumed run goes
    on with them, and it is those of the steps after `resumed_step` that are put aside. Above 10 GiB the oldest
    steps are removed, but for every tenth and for validations, which stay; `say` is told so once.
    """

    def __init__(
        self, log_dir: Path, config: RolloutsConfig, resumed_step: int | None, say: Callable[[str], None]
    ) -> None:
        self._folder = log_dir / ROLLOUTS_FOLDER
        self._config, self._say = config, say
        self._told = False
        for cut_off in self._folder.rglob(f"*{TEMPORARY}"):
            cut_off.unlink()
        there = _files(self._folder)
        if later := [path for path in there if resumed_step is None or _step_of(path) > resumed_step]:
            aside = next_free(self._folder)
            for path in later:
                moved = aside / path.relative_to(self._folder)
                moved.parent.mkdir(parents=True, exist_ok=True)
                path.rename(moved)
        self._sizes = {path: path.stat().st_size for path in _files(self._folder)}

    def log(self, step: int, answers: Iterable[Sample]) -> None:
        """Write the answers of a step; raises OSError, and then leaves nothing of the file."""
        by_folder: dict[Path, list[Sample]] = {}
        for sample in answers if self._config.answers_with_tokens is not None else ():
            folder = self._folder / VALIDATION_FOLDER if sample.of_validation else self._folder
            by_folder.setdefault(folder, []).append(sample)
        encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
        for folder in sorted(by_folder):  # training, then validation
            lines = list[str]()
            for sample in by_folder[folder]:
                try:
                    lines.append(encode(vars(sample)))
                except ValueError:  # JSON has no numbers that are not finite
                    finite = vars(sample).copy()
                    for name, value in finite.items():
                        if isinstance(value, float) and not math.isfinite(value):
                            finite[name] = None
                    lines.append(encode(finite))
            # A lone surrogate, which no encoding takes, becomes the escape that JSON has for it.
            text = "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")
            packed = gzip.compress(text, _COMPRESSION, mtime=0)
            path = folder / f"step_{step}.jsonl.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(packed)
            self._sizes[path] = len(packed)
        self._keep_to_the_bound(step)

    def _keep_to_the_bound(self, newest: int) -> None:
        total = sum(self._sizes.values())
        if total <= _MOST_BYTES:
            return
        removable = [path for path in self._sizes if path.parent == self._folder]
        for path in sorted(removable, key=_step_of):
            if total <= _MOST_BYTES:
                break
            if _step_of(path) % _KEPT_ONE_IN and _step_of(path) != newest:
                path.unlink(missing_ok=True)
                total -= self._sizes.pop(path)
        if not self._told:
            self._told = True
            self._say(
                f"{self._folder} has reached {_MOST_BYTES / _GIB:g} GiB: from now on the "
                f"oldest steps are removed, but for every {_KEPT_ONE_IN}th"
            )


def read_rollouts(path: Path, most_bytes: int | None = None) -> Iterator[dict[str, object]]:
    """Yield the answers in a file; ValueError where they take more than `most_bytes`, OSError for no regular file."""
    left = most_bytes
    with open_regular(path) as packed, gzip.GzipFile(fileobj=packed) as file:
        while line := file.readline(-1 if left is None else left + 1):
            if left is not None and (left := left - len(line)) < 0:
                raise ValueError(f"its answers take more than {most_bytes} bytes")
            yield json.loads(line)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("step_*") if _NAME.fullmatch(path.name)]


def _step_of(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


METRICS_FILE = "metrics.jsonl"
_STEPS = 10

Row = Mapping[str, float]
"""The metrics of one step, with its number under "step"."""


class JsonlSink:
    """`log_dir/metrics.jsonl`: one object a step, on disk as soon as it is logged; null stands for what is not finite.

    A file that an earlier run left is renamed to `metrics.1.jsonl`, or the next free number. A resumed run goes on with
    the file, and it is the rows after `resumed_step` that are put aside so.
    """

    def __init__(self, log_dir: Path, resumed_step: int | None = None) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._path = log_dir / METRICS_FILE
        if self._path.exists() and self._path.stat().st_size:
            if resumed_step is None:
                self._path.rename(next_free(self._path))
            else:
                kept, later = list[str](), list[str]()
                for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True):
                    try:
                        is_kept = line.endswith("\n") and int(json.loads(line)["step"]) <= resumed_step
                    except (ValueError, TypeError, KeyError):
                        is_kept = False
                    (kept if is_kept else later).append(line)
                # Copied first, and the file replaced at once: wherever the process dies, no row is lost.
                for path, lines in ((next_free(self._path), later), (self._path, kept)) if later else ():
                    with replacing(path) as file:
                        file.write("".join(lines).encode())
        self._file = open_to_append(self._path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._path.stat()  # a file without a name takes every row
        _write_row(self._file, {"step": step, **metrics})

    def close(self) -> None:
        self._file.close()


def complete_rows(log_dir: Path, rows: Sequence[Row]) -> None:
    """Make the file of these rows whole: one that was cut off, and those after it, are written again."""
    log_dir.mkdir(parents=True, exist_ok=True)
    with open_to_append(log_dir / METRICS_FILE) as file:
        text = (log_dir / METRICS_FILE).read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            file.truncate(len(whole))
        for row in rows[whole.count(b"\n") :]:
            _write_row(file, row)


def _write_row(file: BinaryIO, row: Row) -> None:
    """Write all of a line; a disk that is nearly full takes a part of it and fails at the rest."""
    finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
    left = memoryview(json.dumps(finite, allow_nan=False).encode() + b"\n")
    while left:
        left = left[file.write(left) or 0 :]


def read_history(
    log_dir: Path, damaged: Callable[[ValueError], object] | None = None
) -> list[dict[str, float]]:
    """Read the rows of a run from its folder; null comes back as NaN, a last line that was cut off is left out.

    Raises ValueError where there is no metrics.jsonl, or a line is not a row and no `damaged` is told of it instead.
    """
    path = log_dir / METRICS_FILE
    if not path.is_file():
        raise RefusedError(
            f"{path} does not exist; give the folder of a run (its logger.log_dir)", code="no-run"
        )
    *complete, _ = path.read_bytes().split(b"\n")
    rows: list[dict[str, float]] = []
    for number, line in enumerate(complete, start=1):
        try:
            values: dict[str, Any] = json.loads(line)
            if not math.isfinite(values.get("step", math.nan)):
                raise ValueError("its step is no number")
            # One string a name, whatever the number of rows.
            row = {sys.intern(name): math.nan if one is None else float(one) for name, one in values.items()}
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            broken = RefusedError(f"{path}:{number} is not a row of metrics: {error}", code="broken-row")
            if damaged is None:
                raise broken from error
            damaged(broken)
        else:
            rows.append(row)
    return rows


@dataclass
class EqualRewardsSink:
    """Tells of ten steps in a row whose answers all had one reward, once a row, or of a shorter run of no others."""

    notify: Callable[[str], None]
    _in_a_row: int = 0
    _steps: int = 0
    _reward: float = 0.0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "train/reward_min" not in metrics:
            return
        self._steps += 1
        self._reward = metrics["train/reward_min"]
        self._in_a_row = self._in_a_row + 1 if self._reward == metrics["train/reward_max"] else 0
        if self._in_a_row == _STEPS:
            self._tell()

    def close(self) -> None:
        if 0 < self._in_a_row == self._steps < _STEPS:
            self._tell()
        self._steps = 0

    def _tell(self) -> None:
        self.notify(
            f"all answers of the last {self._in_a_row} steps have had the reward {self._reward:g}, which teaches "
            "nothing: read some in rollouts/, and what env compares them with (check --full)"
        )
