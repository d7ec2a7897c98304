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
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import cast

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
class Scored:
    """A sample, as far as metrics read it.

    tokens: its length. finished: it ended by itself, not at the length limit. vote: the number, among the samples of
    its prompt, of the first one that gives the same answer; None for one that gives none.
    """

    reward: float
    tokens: int
    finished: bool
    vote: int | None

    @property
    def correct(self) -> bool:
        return self.reward >= 1.0


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its standard error; `stderr` is None with one prompt, which tells nothing of others."""

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
                # Ways to fill the rest: coefficient i of a polynomial is that with i samples.
                rest = [math.comb(silent, taken) for taken in range(silent + 1)]
                for other in others:
                    behind = sum(place > first for place in other)
                    ways = [math.comb(len(other), taken) for taken in range(min(size, len(other) + 1))]
                    rest = _product([*ways, math.comb(behind, size)], rest, k - size)
                if k - size < len(rest):
                    won += math.comb(later, size - 1) * rest[k - size]
    return float(Fraction(won, math.comb(samples, k)))


def _product(one: Sequence[int], other: Sequence[int], degree: int) -> list[int]:
    """Return the product of two polynomials up to a degree."""
    product = [0] * (min(degree, len(one) + len(other) - 2) + 1)
    for low, factor in enumerate(one[: degree + 1]):
        for place, value in enumerate(other[: degree + 1 - low], start=low):
            product[place] += factor * value
    return product


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


def set_metrics(prompts: Sequence[Sequence[Scored]], k_values: Sequence[int]) -> dict[str, Estimate]:
    """Return what a set amounts to; `prompts` has the samples of each prompt, in their order.

    reward and accuracy, the share of correct samples; pass@k and maj@k for each k; tokens, the length of a response;
    truncated, the share that ended at the length limit.
    """
    metrics = {
        "reward": [_mean([sample.reward for sample in samples]) for samples in prompts],
        "accuracy": [_mean([sample.correct for sample in samples]) for samples in prompts],
    }
    for k in k_values:
        metrics[f"pass@{k}"] = [pass_at_k([sample.correct for sample in samples], k) for samples in prompts]
    for k in k_values:
        metrics[f"maj@{k}"] = [
            maj_at_k([sample.vote for sample in samples], [sample.correct for sample in samples], k)
            for samples in prompts
        ]
    metrics["tokens"] = [_mean([sample.tokens for sample in samples]) for samples in prompts]
    metrics["truncated"] = [_mean([not sample.finished for sample in samples]) for samples in prompts]
    return {name: over_prompts(values) for name, values in metrics.items()}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


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
        raise folder_error("logger.log_dir", folder, error, "make room, or name another folder") from error


def enter(folder: Path, identity: Tree, notify: Callable[[str], None]) -> None:
    """Make the folder one of this identity; `notify` is told of files that are set aside. Raises FolderError.

    Files of other kinds, such as data or metrics, stay where they are.
    """
    current = json.loads(json.dumps(identity))
    path = folder / IDENTITY_FILE
    with writing_to(folder):
        try:
            saved = read_json(path)
        except FileNotFoundError:
            saved = None
        except ValueError:
            saved = "broken"
        if saved == current:
            return
        both = [cast("dict[str, object]", one) if isinstance(one, dict) else {} for one in (saved, current)]
        sets = [one.get("sets") for one in both]
        names = dict.fromkeys(name for one in sets if isinstance(one, dict) for name in cast("Tree", one))
        # The identity goes last: until then a command that is killed here begins again.
        evaluated = [*(f"{name}.jsonl" for name in names), RESULTS_FILE, IDENTITY_FILE]
        if theirs := [folder / name for name in evaluated if (folder / name).is_file()]:
            aside = next_free(folder / ASIDE)
            aside.mkdir()
            for file in theirs:
                file.rename(aside / file.name)
            was, now = (dict(leaves(one)) for one in both)
            others = [key for key in {**now, **was} if was and was.get(key) != now.get(key)]
            notify(f"set aside: {aside}" + (f", of another {', '.join(others[:_SHOWN])}" if others else ""))
        write_json(path, current)


def write_json(path: Path, value: object) -> None:
    """Write a file that is whole or not there; raises OSError."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1, ensure_ascii=True, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


_SECTIONS = {"seed", "policy", "env", "eval", "cluster"}
_OF_THE_PLACE = ("init_checkpoint", "model_name", "tokenizer")
"""Keys of the policy that say where its weights lie, and not which they are."""


def identity_of(config: RunConfig, sets: Mapping[str, Sequence[Prompt]]) -> dict[str, object]:
    """Return the weights, the prompts of each set, and what of the recipe an answer and its score depend on.

    The weights of a checkpoint are the checksum of its checksums; those of a Hugging Face folder its files by name,
    size and time.
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
    recipe = config.model_dump(mode="json", include=_SECTIONS)
    recipe["policy"] = {
        key: value
        for key, value in recipe["policy"].items()
        if key not in _OF_THE_PLACE and not key.endswith("_timeout_s")
    }
    del recipe["eval"]["sets"]  # their prompts say it
    return {
        "weights": weights,
        "sets": {name: digest_of(prompts) for name, prompts in sets.items()},
        "batch_size": config.loop.val_batch_size,
        **recipe,
    }


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
            try:
                row = _ROW.validate_python(parse_json(line))
            except ValueError:
                break
            if (row.index, row.sample) != key:
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
