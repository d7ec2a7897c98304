"""Transformer Engine's layers against the local ones, from the same weights, and its packed rows against padded ones.

It knows no CPU: with `--device cpu` the local layers stand in for its own, which shows that the comparison works.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import tiny
from one_rank import be_the_only_rank
from report import Report
from trained_worker import (
    PRECISIONS,
    TOLERANCES,
    check_checkpoint,
    compare,
    leave,
    prepare,
    trained,
    worker_config,
    write_start,
)

LAYERS = {"cuda": "transformer_engine", "cpu": "local"}


def run(report: Report, device: str) -> None:
    report.doing("importing Megatron")
    be_the_only_rank()
    prepare()
    with tempfile.TemporaryDirectory() as scratch:
        for precision in PRECISIONS:
            with report.attempt(f"{precision}: the start", "weights are drawn and written"):
                write_start(Path(scratch) / precision, precision, device)
                for fused in (False, True):
                    check_layers(report, Path(scratch), device, LAYERS[device], precision, fused)
    report.doing("leaving the process group")
    leave()


def check_layers(report: Report, folder: Path, device: str, layers: str, precision: str, fused: bool) -> None:
    name = f"{layers}, {precision}, {'fused' if fused else 'unfused'}"
    tolerances = TOLERANCES["float32 in TF32" if (device, precision) == ("cuda", "float32") else precision]
    with report.attempt(f"{name}: as the local layers", "both train"):
        expected, _ = trained(worker_config(folder, precision, device, fused), device, fused)
        config = worker_config(folder, precision, device, fused, layers=layers)
        padded, worker = trained(config, device, fused)
        compare(report, f"{name}: as the local layers", padded, expected, tolerances)
        check_checkpoint(report, name, worker, device, tiny.grpo_loss(fused=fused))
        with report.attempt(f"{name}: packed rows as padded ones", "packed rows train"):
            config = worker_config(folder, precision, device, fused, layers=layers, packed=True)
            packed, _ = trained(config, device, fused)
            compare(report, f"{name}: packed rows as padded ones", packed, padded, tolerances)
