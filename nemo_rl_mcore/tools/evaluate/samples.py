"""A set's samples on disk, one JSON line each, in the order of prompts and samples; and their metrics.

Rounding may depend on the other rows of a batch. A resumed evaluation therefore repeats the same batches: a batch that
was only partly written is discarded.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import accumulate, repeat
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
from pydantic import TypeAdapter

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.hub import fetched_folder
from nemo_rl_mcore.data.strict_json import parse_json, read_json
from nemo_rl_mcore.driver.checkpoints import INFO_FILE
from nemo_rl_mcore.driver.run_folder import leaves, next_free, open_own, open_to_append, replacing
from nemo_rl_mcore.errors import RefusedError, folder_error
from nemo_rl_mcore.rank.checkpoints import SUMS_FILE, sha256


@dataclass(frozen=True)
class SampleRow:
    """A line of the file.

    index: the prompt's, in its set. sample: the answer's number for this prompt. answer: read from the response by the
    environment; None if there is none. gold: the data's answer. tokens: the response's length. finished: False at the
    length limit. vote: the first of the prompt's samples with the same answer; None without an answer.
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
    def correct(self) -> bool:
        return self.reward >= 1.0


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its standard error; `stderr` is None with one prompt."""

    mean: float
    stderr: float | None


def pass_at_k(correct: Sequence[bool], k: int) -> float:
    """Return the probability that at least one of k samples, drawn from n without replacement, is correct.

    1 - C(n-c, k) / C(n, k) with c correct ones, in exact integers: the unbiased estimator of arXiv 2107.03374.
    Raises ValueError unless 1 <= k <= n.
    """
    samples = len(correct)
    _require(k, samples)
    return float(1 - Fraction(math.comb(samples - sum(correct), k), math.comb(samples, k)))


def maj_at_k(votes: Sequence[int | None], correct: Sequence[bool], k: int) -> float:
    """Return the probability that the majority answer of k samples, drawn from n without replacement, is correct.

    This is the share of the C(n, k) subsets, in the samples' order, whose elected sample is correct. Samples with
    equal votes have the same answer; None is no answer. The most frequent answer of the subset wins, and of equally
    frequent ones the first; it elects the first sample that has it. A subset without answers counts as wrong. With
    k = n this is the majority of all samples. The arithmetic is in exact integers. Raises ValueError unless
    1 <= k <= n.
    """
    samples = len(votes)
    _require(k, samples)
    places: dict[int, list[int]] = {}
    for place, vote in enumerate(votes):
        if vote is not None:
            places.setdefault(vote, []).append(place)
    silent = sum(vote is None for vote in votes)
    won = 0
    for own in places.values():
        others = [other for other in places.values() if other is not own]
        for rank, first in enumerate(own):
            later = len(own) - rank - 1
            if not correct[first]:
                continue
            for size in range(1, min(k, later + 1) + 1):  # votes for the elected answer
                # Coefficient i of this polynomial is the number of ways to choose i other samples, an exact integer.
                rest = np.array([math.comb(silent, taken) for taken in range(silent + 1)], object)
                for other in others:
                    behind = sum(place > first for place in other)
                    ways = [math.comb(len(other), taken) for taken in range(min(size, len(other) + 1))]
                    rest = np.convolve(rest, np.array([*ways, math.comb(behind, size)], object))
                if k - size < len(rest):
                    won += math.comb(later, size - 1) * rest[k - size]
    return float(Fraction(won, math.comb(samples, k)))


def _require(k: int, samples: int) -> None:
    if not 1 <= k <= samples:
        raise RefusedError(
            f"k = {k} needs at least {k} samples per prompt, and there are {samples}", code="too-few-samples"
        )


def over_prompts(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per prompt, with its standard error sd / sqrt(prompts).

    Samples of one prompt are correlated; since the values are means over them, this is the clustered standard error.
    """
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count))


def set_metrics(prompts: Sequence[Sequence[SampleRow]], k_values: Sequence[int]) -> dict[str, Estimate]:
    """Return a set's metrics; prompts: each prompt's samples, in order.

    The metrics are reward; accuracy, the share of correct samples; pass@k and maj@k for each k; tokens, a response's
    length; truncated, the share of responses at the length limit.
    """
    correct = [[sample.correct for sample in samples] for samples in prompts]
    votes = [[sample.vote for sample in samples] for samples in prompts]
    metrics = {
        "reward": [fmean(sample.reward for sample in samples) for samples in prompts],
        "accuracy": [fmean(one) for one in correct],
        **{f"pass@{k}": [pass_at_k(one, k) for one in correct] for k in k_values},
        **{f"maj@{k}": [*map(maj_at_k, votes, correct, repeat(k))] for k in k_values},
        "tokens": [fmean(sample.tokens for sample in samples) for samples in prompts],
        "truncated": [fmean(not sample.finished for sample in samples) for samples in prompts],
    }
    return {name: over_prompts(values) for name, values in metrics.items()}


IDENTITY_FILE = "evaluation.json"
RESULTS_FILE = "results.json"
_SHOWN = 5

Tree = Mapping[str, object]


def digest_of(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 of prompts and answers, in order."""
    whole = hashlib.sha256()
    for prompt in prompts:
        literal = [prompt.literal] if prompt.literal else []
        row = json.dumps([prompt.index, prompt.text, prompt.answer, *literal])
        whole.update(f"{row}\n".encode())
    return whole.hexdigest()


@contextmanager
def writing_to(folder: Path) -> Generator[None]:
    """Raise FolderError, with the folder's name, if it cannot be written."""
    try:
        yield
    except OSError as error:
        raise folder_error(
            "logger.log_dir", folder, error, "free some space, or name another folder"
        ) from error


def enter(folder: Path, identity: Tree, notify: Callable[[str], None]) -> None:
    """Prepare the folder for this evaluation: move a different evaluation's files into a subfolder, and print a line.

    Other files, such as data or metrics, stay. Raises FolderError.
    """
    current = json.loads(json.dumps(identity))
    path = folder / IDENTITY_FILE
    with writing_to(folder):
        saved: Any = None
        with suppress(FileNotFoundError, ValueError):
            saved = read_json(path)
        if saved == current:
            return
        before = cast("dict[str, Any]", saved) if isinstance(saved, dict) else {}
        sets = [one.get("sets") for one in (before, current)]
        names = dict.fromkeys(name for one in sets if isinstance(one, dict) for name in cast("Tree", one))
        # The identity moves last: if the command is killed before, the next one starts over here.
        evaluated = [*(f"{name}.jsonl" for name in names), RESULTS_FILE, IDENTITY_FILE]
        if theirs := [folder / name for name in evaluated if (folder / name).is_file()]:
            aside = next_free(folder / "aside")
            aside.mkdir()
            for file in theirs:
                file.rename(aside / file.name)
            was, now = (dict(leaves(one)) for one in (before, current))
            others = [key for key in {**now, **was} if was and was.get(key) != now.get(key)]
            notify(
                f"set aside: {aside}" + (f", with different {', '.join(others[:_SHOWN])}" if others else "")
            )
        write_json(path, current)


def write_json(path: Path, value: object) -> None:
    """Write a file atomically; raises OSError."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1, ensure_ascii=True, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


_OF_THE_PLACE = ("init_checkpoint", "model_name", "tokenizer")
"""The policy's keys that locate its weights without identifying them."""


def identity_of(config: RunConfig, sets: Mapping[str, Sequence[Prompt]]) -> dict[str, object]:
    """Return everything that answers and scores depend on: weights, each set's prompts, and parts of the recipe.

    A checkpoint is identified by a checksum of its checksums, a Hugging Face folder by its files' names, sizes and
    modification times.
    """
    policy = config.policy
    if policy.init_checkpoint is not None:
        folder = Path(policy.init_checkpoint)
        sums = folder / SUMS_FILE
        weights = f"checkpoint {sha256(sums if sums.is_file() else folder / INFO_FILE)}"
    elif policy.model_name is None:
        weights = "drawn at random by the seed"
    else:
        whole = hashlib.sha256()
        folder = fetched_folder(policy.model_name)
        for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.json"))):
            status = path.stat()
            whole.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        weights = f"Hugging Face {whole.hexdigest()}"
    recipe = config.model_dump(mode="json", include={"seed", "policy", "env", "eval", "cluster"})
    recipe["policy"] = {
        key: value
        for key, value in recipe["policy"].items()
        if key not in _OF_THE_PLACE and not key.endswith("_timeout_s")
    }
    del recipe["eval"]["sets"]  # their prompts are compared
    return {
        "weights": weights,
        "sets": {name: digest_of(prompts) for name, prompts in sets.items()},
        "batch_size": config.loop.val_batch_size,
        **recipe,
    }


_ROW = TypeAdapter(SampleRow)


@dataclass
class SampleFile:
    """A set's file. keys: index and sample of every row, in order. rows: the rows of each batch."""

    path: Path
    keys: Sequence[tuple[int, int]]
    rows: Sequence[int]

    def go_on(self) -> list[SampleRow]:
        """Return the rows of all complete batches, and cut off the rest. Raises OSError."""
        os.close(open_own(self.path, os.O_RDWR))
        content = self.path.read_bytes()
        found, ends = list[SampleRow](), [0]
        with suppress(ValueError):  # raised by an invalid row
            for line, key in zip(content.split(b"\n")[:-1], self.keys, strict=False):
                row = _ROW.validate_python(parse_json(line))
                if (row.index, row.sample) != key:
                    break
                found.append(row)
                ends.append(ends[-1] + len(line) + 1)
        kept = max(rows for rows in accumulate(self.rows, initial=0) if rows <= len(found))
        if ends[kept] < len(content):
            os.truncate(self.path, ends[kept])
        return found[:kept]

    def append(self, rows: Sequence[SampleRow]) -> None:
        """Append a batch's rows and flush them to disk; raises OSError."""
        text = "".join(f"{json.dumps(asdict(row), ensure_ascii=False, allow_nan=False)}\n" for row in rows)
        with open_to_append(self.path, buffering=-1) as file:
            # A tokenizer may decode half a character, which is not valid UTF-8.
            file.write(text.encode(errors="backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
