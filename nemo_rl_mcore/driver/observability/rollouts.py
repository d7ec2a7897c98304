"""Every answer of a run, in its folder: `rollouts/step_N.jsonl.gz`, and `rollouts/validation/step_N.jsonl.gz`."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

from nemo_rl_mcore.config.logger import RolloutsConfig
from nemo_rl_mcore.data.strict_json import open_regular
from nemo_rl_mcore.driver.run_folder import TEMPORARY, next_free, replacing

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
        """Return whether nothing is trained on it."""
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
        for sample in answers if self._config.enabled else ():
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
