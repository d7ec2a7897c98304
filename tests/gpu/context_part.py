"""Two ranks that share sequences against one rank with the same layers, from the same weights."""

from __future__ import annotations

import os
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
from one_rank import be_the_only_rank
from report import Report
from te_part import LAYERS
from trained_worker import (
    PRECISIONS,
    TOLERANCES,
    compare,
    leave,
    prepare,
    trained,
    worker_config,
    write_start,
)

RANKS = 2


def run(report: Report, device: str) -> None:
    report.doing("importing Megatron")
    be_the_only_rank()
    prepare()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for precision in PRECISIONS:
            with report.attempt(f"{precision}: the start", "weights are drawn and written"):
                write_start(folder / precision, precision, device)
        report.doing(f"{RANKS} ranks that share sequences")
        be_the_only_rank()  # for another port that is free; this process has its group already
        torch.multiprocessing.spawn(rank_of_two, (folder, device), nprocs=RANKS)
        for precision, fused, packed in cases():
            check_shared(report, folder, device, precision, fused, packed)
    report.doing("leaving the process group")
    leave()


def cases() -> product[tuple[Any, ...]]:
    return product(PRECISIONS, (False, True), (False, True))


def rank_of_two(rank: int, folder: Path, device: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_float32_matmul_precision("highest")
    prepare(threads=1 if device == "cpu" else None)
    for precision, fused, packed in cases():
        sharing = {"context_parallel_size": RANKS}
        config = worker_config(
            folder, precision, device, fused, layers=LAYERS[device], packed=packed, sharing=sharing
        )
        found, _ = trained(config, device, fused)
        if rank == 0:
            torch.save(found, folder / file_of(precision, fused, packed))
    leave()


def check_shared(
    report: Report, folder: Path, device: str, precision: str, fused: bool, packed: bool
) -> None:
    group = f"{precision}, {'fused' if fused else 'unfused'}, {'packed' if packed else 'padded'}"
    tolerances = TOLERANCES["float32 in TF32" if (device, precision) == ("cuda", "float32") else precision]
    with report.attempt(group, "one rank trains"):
        config = worker_config(folder, precision, device, fused, layers=LAYERS[device], packed=packed)
        expected, _ = trained(config, device, fused)
        found = torch.load(folder / file_of(precision, fused, packed), weights_only=True)
        compare(report, f"{group}: two ranks as one", found, expected, tolerances)


def file_of(precision: str, fused: bool, packed: bool) -> str:
    return f"{precision}-{fused}-{packed}.pt"
