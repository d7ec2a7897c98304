"""What a rehearsal found, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from nemo_rl_mcore.config.base import Tree
from nemo_rl_mcore.tools.rehearse.shrink import Shrink


class Verdict(Enum):
    """What became of a proof."""

    PROVEN = "proven"
    REFUSED = "refused"
    FAILED = "FAILED"
    ON_GPU = "on a GPU"


@dataclass(frozen=True)
class Line:
    """One thing that was to be proven: in which layout, what came of it and why, and the seconds that it took."""

    name: str
    verdict: Verdict
    why: str
    layout: str = ""
    seconds: float = 0.0


ONLY_ON_GPUS = (
    Line("kernels", Verdict.ON_GPU, "Transformer Engine, flash attention, Triton, bfloat16"),
    Line("NCCL", Verdict.ON_GPU, "collectives between GPUs and machines, and their overlap"),
    Line("memory", Verdict.ON_GPU, "nemo-rl-mcore check estimates it for the recipe at its size"),
    Line("speed", Verdict.ON_GPU, "of a step, of engines, of a refit"),
    Line("vLLM", Verdict.ON_GPU, "the recipe's engine, where it is that one"),
)


@dataclass
class Table:
    """All of a rehearsal. open: keys of a recipe of NeMo RL that have no counterpart, and are left out.

    run: the first layout's, for another machine to repeat; see `portable`.
    """

    recipe: str
    algorithm: str
    layouts: list[str] = field(default_factory=list[str])
    shrinks: list[Shrink] = field(default_factory=list[Shrink])
    open: list[str] = field(default_factory=list[str])
    lines: list[Line] = field(default_factory=list[Line])
    seconds: float = 0.0
    run: Tree | None = None

    @property
    def failed(self) -> bool:
        """Return whether anything was found that is not as it is to be."""
        return any(line.verdict is Verdict.FAILED for line in self.lines)

    def rows(self) -> Iterator[str]:
        """Yield the table, a line each."""
        lines = [*self.lines, *ONLY_ON_GPUS]
        wide = max(len(line.name) for line in lines)
        for line in lines:
            where = f"[{line.layout}] " if len(self.layouts) > 1 and line.layout else ""
            time = f"{line.seconds:6.1f} s" if line.seconds else " " * 8
            yield f"{line.verdict.value:8} {line.name:{wide}} {time}  {where}{line.why}"
        counts = [f"{sum(one.verdict is kind for one in lines)} {kind.value}" for kind in Verdict]
        yield f"{', '.join(counts)}; {self.seconds:.0f} s"

    def write(self, file: Path) -> None:
        """Write it as JSON."""
        lines: Sequence[Line] = (*self.lines, *ONLY_ON_GPUS)
        written = {
            "recipe": self.recipe,
            "algorithm": self.algorithm,
            "failed": self.failed,
            "seconds": round(self.seconds, 1),
            "layouts": self.layouts,
            "open": self.open,
            "shrinks": [vars(one) for one in self.shrinks],
            "lines": [{**vars(line), "verdict": line.verdict.value} for line in lines],
            **({"run": self.run} if self.run is not None else {}),
        }
        file.write_text(json.dumps(written, indent=2, default=str) + "\n", encoding="utf-8")
