"""The first layout of a rehearsal on one rank of the device: its first steps compute what they did on the CPU."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from report import Report
from runs import ONE_RANK, Steps, command
from trained_worker import TOLERANCES

from nemo_rl_mcore.tools.rehearse.runs import unpacked

GROUP = "a rehearsal as on the CPU"
LAYERS = "policy.megatron_cfg.transformer_impl=local"
# After a step weights differ by rounding, and an answer here and there is drawn otherwise.
LATER = {"train/loss": 0.05, "train/grad_norm": 0.1, "train/reward": 0.02}


def run(report: Report, device: str) -> None:
    """Run the rehearsal's recipe, and compare its steps with those in the file."""
    found = json.loads(Path(os.environ["REHEARSAL"]).read_text(encoding="utf-8"))
    if "run" not in found:
        report.failed(GROUP, found["recipe"], "the rehearsal has no run: it failed before its last step")
        return
    with tempfile.TemporaryDirectory() as scratch, report.attempt(GROUP, found["recipe"]):
        recipe = unpacked(found["run"], Path(scratch))
        folder = Path(scratch) / "found"
        steps = command(found["run"]["algorithm"], recipe, folder, *ONE_RANK[device], LAYERS)
        compare(report, steps, found["run"]["steps"])


def compare(report: Report, found: Steps, expected: Steps) -> None:
    """Compare the first step within what float32 allows, and those after it within `LATER`."""
    assert len(found) == len(expected), f"{len(found)} steps, and {len(expected)} in the file"
    allowed = TOLERANCES["float32"]
    first = {"train/loss": allowed["loss"], "train/grad_norm": allowed["gradient norm"], "train/reward": 0.0}
    for number, (one, other) in enumerate(zip(found, expected, strict=True), start=1):
        for name, tolerance in (first if number == 1 else LATER).items():
            if name in other:
                difference = abs(one[name] - other[name]) / (1 + abs(other[name]))
                report.compared(GROUP, f"{name} of step {number}", difference, tolerance)
