"""The samples of a set on disk: a JSON object a line, in the order of prompts and samples, whole batches at a time.

A batch is what the engine is asked together. Rounding may depend on what stands beside a row, so that an evaluation
that goes on asks the same batches: of one that was half written nothing is kept.
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
    """A line.

    index: of the prompt in its set; sample: its number among the prompt's answers. answer: read from the response by
    the environment, None where it finds none. gold: the data's answer. tokens: the response's length. finished: it
    ended by itself, not at the length limit. vote: the number, among its prompt's samples, of the first one with the
    same answer; None without an answer.
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
    """Return the chance that of k samples, drawn from the n without replacement, at least one is correct.

    1 - C(n-c, k) / C(n, k) with c correct ones, in exact integers: the unbiased estimator of arXiv 2107.03374.
    Raises ValueError unless 1 <= k <= n.
    """
    samples = len(correct)
    _require(k, samples)
    return float(1 - Fraction(math.comb(samples - sum(correct), k), math.comb(samples, k)))


def maj_at_k(votes: Sequence[int | None], correct: Sequence[bool], k: int) -> float:
    """Return the chance that the majority of k samples, drawn from the n without replacement, is correct.

    Of the C(n, k) subsets of the samples, each in the samples' order, the share in which the elected sample is
    correct. Samples with equal votes give the same answer; None gives none and elects nobody. The answer that most
    samples of the subset give wins, of several the one that was given first; the elected sample is the first that gives
    it. A subset without an answer is wrong. With k = n this is the majority of all samples. In exact integers.
    Raises ValueError unless 1 <= k <= n.
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
            for size in range(1, min(k, later + 1) + 1):  # of the elected answer's share of the subset
                # Ways to fill the rest: coefficient i of a polynomial is that with i samples, an exact integer.
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
            f"k = {k} needs as many samples of a prompt, and there are {samples}", code="too-few-samples"
        )


def over_prompts(values: Sequence[float]) -> Estimate:
    """Return the mean of one value a prompt, with the standard error of a mean over drawn prompts: sd / sqrt(prompts).

    Samples of one prompt resemble each other. Values that are means over them make this the clustered error.
    """
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count))


def set_metrics(prompts: Sequence[Sequence[SampleRow]], k_values: Sequence[int]) -> dict[str, Estimate]:
    """Return a set's metrics; `prompts` has each prompt's samples, in their order.

    reward and accuracy, the share of correct samples; pass@k and maj@k for each k; tokens, the length of a response;
    truncated, the share that ended at the length limit.
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
    """Return the SHA-256 of prompts and answers, in their order."""
    whole = hashlib.sha256()
    for prompt in prompts:
        literal = [prompt.literal] if prompt.literal else []
        row = json.dumps([prompt.index, prompt.text, prompt.answer, *literal])
        whole.update(f"{row}\n".encode())
    return whole.hexdigest()


@contextmanager
def writing_to(folder: Path) -> Generator[None]:
    """Raise FolderError, naming the folder, where it cannot be written to."""
    try:
        yield
    except OSError as error:
        raise folder_error("logger.log_dir", folder, error, "make room, or name another folder") from error


def enter(folder: Path, identity: Tree, notify: Callable[[str], None]) -> None:
    """Make the folder one of this identity; `notify` gets a line on files that are set aside. Raises FolderError.

    Files of other kinds, such as data or metrics, stay where they are.
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
        # The identity goes last: until then a command that is killed here begins again.
        evaluated = [*(f"{name}.jsonl" for name in names), RESULTS_FILE, IDENTITY_FILE]
        if theirs := [folder / name for name in evaluated if (folder / name).is_file()]:
            aside = next_free(folder / "aside")
            aside.mkdir()
            for file in theirs:
                file.rename(aside / file.name)
            was, now = (dict(leaves(one)) for one in (before, current))
            others = [key for key in {**now, **was} if was and was.get(key) != now.get(key)]
            notify(f"set aside: {aside}" + (f", of another {', '.join(others[:_SHOWN])}" if others else ""))
        write_json(path, current)


def write_json(path: Path, value: object) -> None:
    """Write a file that is whole or not there; raises OSError."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1, ensure_ascii=True, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


_OF_THE_PLACE = ("init_checkpoint", "model_name", "tokenizer")
"""Keys of the policy that locate its weights and do not identify them."""


def identity_of(config: RunConfig, sets: Mapping[str, Sequence[Prompt]]) -> dict[str, object]:
    """Identify the weights, the prompts of each set, and the parts of the recipe that answers and scores depend on.

    A checkpoint is identified by the checksum of its checksums, a Hugging Face folder by its files' names, sizes and
    times.
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
    """The file of a set.

    keys: index and sample of every row to come; rows: how many of them each batch has.
    """

    path: Path
    keys: Sequence[tuple[int, int]]
    rows: Sequence[int]

    def go_on(self) -> list[SampleRow]:
        """Return the rows of the whole batches that are there, and cut off the rest. Raises OSError."""
        os.close(open_own(self.path, os.O_RDWR))
        content = self.path.read_bytes()
        found, ends = list[SampleRow](), [0]
        with suppress(ValueError):  # raised by a line that is no row
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
        """Bring the rows of a batch to disk; raises OSError."""
        text = "".join(f"{json.dumps(asdict(row), ensure_ascii=False, allow_nan=False)}\n" for row in rows)
        with open_to_append(self.path, buffering=-1) as file:
            # A tokenizer may decode half of a character, which is no UTF-8.
            file.write(text.encode(errors="backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
