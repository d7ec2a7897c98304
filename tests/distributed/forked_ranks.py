"""Four gloo ranks forked after torch is imported, so the import is paid once; groups of 1, 2 and 4 share them."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

RANKS = 4
Report = Callable[[dict[int, ProcessGroup]], Any]


def run_script(path: str, destination: Path) -> list[Any]:
    """Run a script that calls `write_reports` on the path of a file; what each rank reported."""
    run = subprocess.run(
        [sys.executable, path, str(destination)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(destination.read_text())


def write_reports(report: Report, destination: str) -> None:
    """Call `report` with the groups of each size on every rank; write what the ranks return as JSON."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        processes = [
            fork.Process(target=_serve, args=(report, rank, folder), daemon=True) for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=120)
        if any(process.exitcode != 0 for process in processes):
            raise SystemExit(f"exit codes {[process.exitcode for process in processes]}")
        reports = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    Path(destination).write_text(json.dumps(reports))


def _serve(report: Report, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    groups: dict[int, ProcessGroup] = {}
    for size in (1, 2, 4):
        for first in range(0, RANKS, size):
            members = list(range(first, first + size))
            group = dist.new_group(members)
            if rank in members:
                groups[size] = group
    Path(folder, f"rank{rank}.json").write_text(json.dumps(report(groups)))
    dist.destroy_process_group()


@contextmanager
def recorded_collectives() -> Iterator[list[tuple[str, int]]]:
    """What is sent: the kind of each collective and its number of elements."""
    names = "all_gather_single", "reduce_scatter_single", "all_reduce"
    originals = {name: getattr(dist, name) for name in names}
    sent: list[tuple[str, int]] = []

    def spy(name: str):
        def call(*tensors: Tensor, **kwargs: Any):
            sent.append((name, tensors[-1].numel()))
            return originals[name](*tensors, **kwargs)

        return call

    for name in names:
        setattr(dist, name, spy(name))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
