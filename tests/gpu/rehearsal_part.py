"""The first layout of a rehearsal on one rank of the device: its first steps compute what they did on the CPU."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from report import Report
from runs import ONE_RANK, command, compare_steps

from nemo_rl_mcore.tools.rehearse.runs import unpacked

GROUP = "a rehearsal as on the CPU"
LAYERS = "policy.megatron_cfg.transformer_impl=local"


def run(report: Report, device: str) -> None:
    found = json.loads(Path(os.environ["REHEARSAL"]).read_text(encoding="utf-8"))
    if "run" not in found:
        report.failed(GROUP, found["recipe"], "the rehearsal has no run: it failed before its last step")
        return
    with tempfile.TemporaryDirectory() as scratch, report.attempt(GROUP, found["recipe"]):
        recipe = unpacked(found["run"], Path(scratch))
        folder = Path(scratch) / "found"
        steps = command(found["run"]["algorithm"], recipe, folder, *ONE_RANK[device], LAYERS)
        compare_steps(report, GROUP, steps, found["run"]["steps"])
