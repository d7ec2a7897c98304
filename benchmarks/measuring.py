"""Time and memory of competing methods, each in fresh subprocesses that take turns.

Every other round runs the methods in reverse order, so that a machine's drift and its other load fall on all
of them alike. What comes out is medians over the rounds, and ratios to the first method.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, float]


class Clock:
    """Seconds and bytes as the device counts them.

    On CPU the process's CPU time and the high-water mark of its resident set (Linux); on CUDA the wall time
    between synchronisations and the peak of torch's allocator.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.cuda = device == "cuda"

    def now(self) -> float:
        if not self.cuda:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def start_memory(self) -> int:
        """Forget former peaks; the bytes in use now."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return self._status("VmRSS")

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated() if self.cuda else self._status("VmHWM")

    @staticmethod
    def _status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def in_subprocess(script: str, request: Any) -> Any:
    """What `script --child REQUEST` prints on its last line, as JSON; None, with a printed line, if it failed."""
    command = [sys.executable, script, "--child", json.dumps(request)]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Inductor's compile workers outlive the child and would hold its pipes open.
    environment = os.environ | {"PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if run.returncode != 0:
        print(f"  {request}: failed: {(run.stderr.strip().splitlines() or ['no message'])[-1][:150]}")
        return None
    return json.loads(run.stdout.splitlines()[-1])


def alternate(script: str, requests: dict[str, Any], rounds: int) -> dict[str, Figures]:
    """Medians over the rounds, by the methods' names, of what each one's child reports."""
    results: dict[str, list[Figures]] = {name: [] for name in requests}
    for turn in range(rounds):
        for name in requests if turn % 2 == 0 else reversed(requests):
            if (figures := in_subprocess(script, requests[name])) is not None:
                results[name].append(figures)
    return {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in results.items()
        if runs
    }


def table(
    median: dict[str, Figures], columns: dict[str, float], extra: dict[str, list[str]] | None = None
) -> None:
    """Print figures in the columns' units and, in brackets, how many times those of the first method they are."""
    base = next(iter(median.values()), {})
    for name, row in median.items():
        cells = [f"{row[key] / unit:.3f} ({row[key] / base[key]:.2f})" for key, unit in columns.items()]
        more = (extra or {}).get(name, [])
        print(
            "  "
            + f"{name:20} "
            + " ".join(f"{cell:>18}" for cell in cells)
            + "".join(f" {c:>9}" for c in more)
        )
    print(f"  {load()}", flush=True)


def header(columns: Iterable[str], extra: Iterable[str] = ()) -> None:
    print(
        "  " + f"{'method':20} " + " ".join(f"{c:>18}" for c in columns) + "".join(f" {c:>9}" for c in extra)
    )


def load() -> str:
    """The machine's load, without which a time says little."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"
