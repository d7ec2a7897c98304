"""Whether a long asynchronous run grows: memory, threads and open files of its processes, and the log of its groups.

    python benchmarks/flatness.py [--steps 300] [--out FOLDER] [OVERRIDE ...]

Runs `examples/configs/grpo_copy_async_cpu.yaml` and looks at it every second. Growth is the slope of a least-squares
line over the steps after the 50th, which fill caches and pools. Exits with 1 where a limit is exceeded.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from processes import ProcessWatch, read

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "examples/configs/grpo_copy_async_cpu.yaml"
SETTLED, FEWEST = 50, 250
"""Steps that are not counted, and how many a run must have: a rank's memory goes up and down by some megabytes."""
LIMIT_S = 3600.0
GROWTH_MB = 0.02
"""Resident memory that a process may gain in a step, in megabytes; less is below what a rank goes up and down by."""
STEADY = 1.1
"""The log's bytes per step in the second half, as a multiple of those in the first: numbers get longer."""
ROLES = {"MegatronPolicyWorker": "rank", "EmbeddedEngine": "engine"}


@dataclass(frozen=True)
class Look:
    """What was seen at once; sizes in bytes, resident memory in megabytes by process."""

    step: int
    resident: dict[str, float]
    threads: int
    files: int
    log: int


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the least-squares line."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def resident_mb(pid: int) -> float | None:
    """None for a process that has ended."""
    fields = read(Path(f"/proc/{pid}/statm")).split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6 if fields else None


class Watched:
    """A run under way."""

    def __init__(self, folder: Path, overrides: Sequence[str]) -> None:
        self.folder, self.watch = folder, ProcessWatch()
        command = [sys.executable, "-m", "nemo_rl_mcore", "grpo", "--config", str(RECIPE)]
        with (folder / "output.txt").open("wb") as output:
            self.process = subprocess.Popen(
                [*command, f"logger.log_dir={folder / 'log'}", *overrides],
                env={**os.environ, **self.watch.environment},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.watch.follow(self.process.pid)

    def look(self) -> Look | None:
        """None before the first step and when the run has ended."""
        driver = Path(f"/proc/{self.process.pid}")
        metrics = read(self.folder / "log/metrics.jsonl").splitlines()
        resident = {"driver": resident_mb(self.process.pid)}
        for pid, title in sorted(self.watch.alive().items()):
            for word, role in ROLES.items():
                if title.startswith("ray::") and word in title:
                    resident[f"{role} {pid}"] = resident_mb(pid)
        seen = {name: size for name, size in resident.items() if size is not None}
        try:
            threads, files = (len(list((driver / kind).iterdir())) for kind in ("task", "fd"))
        except OSError:
            return None
        if not metrics or "driver" not in seen:
            return None
        log = (self.folder / "log/groups.jsonl").stat().st_size
        return Look(json.loads(metrics[-1])["step"], seen, threads, files, log)

    def looks(self) -> list[Look]:
        """One a second until the end."""
        found: list[Look] = []
        deadline = time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run did not end within {LIMIT_S:g} s")
            if (look := self.look()) is not None:
                found.append(look)
            time.sleep(1)
        return found


def judge(looks: Sequence[Look]) -> list[tuple[str, str, bool]]:
    """What was found, the figures, and whether it is within its limit; the end of the run is not counted."""
    last = looks[-1].step
    settled = [look for look in looks if SETTLED < look.step < last]
    middle = (SETTLED + last) / 2
    # Processes that were there throughout: some are started when they are first needed.
    lasting = set.intersection(*({*look.resident} for look in settled))
    verdicts = [_memory(name, settled, middle) for name in sorted(lasting)]
    verdicts.append(("processes", f"{len(lasting)} throughout", len(lasting) >= 1 + len(ROLES)))
    first, second = (
        slope([(look.step, look.log) for look in settled if (look.step > middle) is later])
        for later in (False, True)
    )
    verdicts.append(("log", f"{first:.0f}, then {second:.0f} bytes a step", second < STEADY * first))
    for name in ("threads", "files"):
        counts = [
            [getattr(x, name) for x in settled if (x.step > middle) is later] for later in (False, True)
        ]
        before, after = map(statistics.median, counts)
        figures = f"{before:g}, then {after:g} (at most {max(map(max, counts))})"
        verdicts.append((f"driver's {name}", figures, before == after))
    return verdicts


def _memory(name: str, looks: Sequence[Look], middle: float) -> tuple[str, str, bool]:
    """What leaks grows in the second half too, and what fills the allocator's pools has done so by then."""
    sizes = [(look.step, look.resident[name]) for look in looks]
    growth = slope(sizes)
    later = slope([(step, size) for step, size in sizes if step > middle])
    figures = f"{growth:+.4f}, in the second half {later:+.4f} MB a step ({sizes[0][1]:.1f} to {sizes[-1][1]:.1f} MB)"
    return name, figures, min(growth, later) < GROWTH_MB


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help="keep the run and what was seen here")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    if options.steps < FEWEST:
        parser.error(f"--steps: {options.steps} is too few; at least {FEWEST}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run = Watched(folder, [f"grpo.max_num_steps={options.steps}", *options.overrides])
        try:
            looks = run.looks()
        finally:
            run.watch.kill_all()
        (folder / "looks.jsonl").write_text("".join(f"{json.dumps(vars(look))}\n" for look in looks))
        if run.process.returncode or not looks:
            print((folder / "output.txt").read_text())
            return 1
    verdicts = judge(looks)
    print(f"{len(looks)} looks, steps {SETTLED + 1} to {looks[-1].step - 1}")
    for name, figures, good in verdicts:
        print(f"{'flat ' if good else 'GROWS'} {name:14} {figures}")
    return int(not all(good for _, _, good in verdicts))


if __name__ == "__main__":
    sys.exit(main())
