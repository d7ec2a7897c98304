"""The samples of a set on disk: a JSON object a line, in the order of prompts and samples, whole batches at a time.

A batch is what the engine is asked together. Rounding may depend on what stands beside a row, so that an evaluation
that goes on asks the same batches: of one that was half written nothing is kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from nemo_rl_mcore.data.strict_json import parse_json
from nemo_rl_mcore.driver.own_files import open_own, open_to_append
from nemo_rl_mcore.tools.evaluate.metrics import Scored


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
