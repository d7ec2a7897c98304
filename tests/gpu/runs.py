"""Recipes that a part runs by the command, in a process of the part's own process group, which its deadline ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from report import Report
from trained_worker import TOLERANCES

from nemo_rl_mcore.driver.observability import read_history

Steps = Sequence[Mapping[str, float]]

CONFIGS = Path(__file__).resolve().parents[2] / "examples/configs"
# One rank on the device, which writes no more than its metrics.
ONE_RANK = {
    "cuda": ("cluster.gpus_per_node=1",),
    "cpu": ("cluster.gpus_per_node=0", "cluster.cpu_workers_per_node=1"),
}
# Between what engines and ranks say of a token, the mean of exp|difference|.
MISMATCH = {"float32": 1.001, "bfloat16": 1.05}
# After a step weights differ by rounding, and of 256 answers one here and there is drawn otherwise.
LATER = {"train/reward": 0.02, "train/loss": 0.05, "train/grad_norm": 0.1}
_QUIET = ("grpo.val_period=0", "grpo.val_at_end=false", "logger.tensorboard_enabled=false")


def grpo(recipe: str, folder: Path, device: str, *overrides: str) -> Steps:
    """Run a recipe of examples/configs on one rank to its end, in `folder`; returns the metrics of its steps."""
    return command("grpo", CONFIGS / recipe, folder, *ONE_RANK[device], *_QUIET, *overrides)


def command(algorithm: str, recipe: Path, folder: Path, *overrides: str) -> Steps:
    called = [sys.executable, "-m", "nemo_rl_mcore", algorithm, "--config", str(recipe)]
    ended = subprocess.run(
        [*called, f"logger.log_dir={folder}", *overrides],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    sys.stderr.write(ended.stdout)
    if ended.returncode:
        last = ended.stdout.strip().splitlines()[-1:]
        raise RuntimeError(f"{recipe.name} ended with status {ended.returncode}: {last}")
    return read_history(folder)


def mean(steps: Steps, name: str) -> float:
    return sum(step[name] for step in steps) / len(steps)


def check_rewards(report: Report, group: str, steps: Steps, at_first: float, at_last: float) -> None:
    first, last = mean(steps[:5], "train/reward"), mean(steps[-10:], "train/reward")
    report.compared(group, f"the reward of the first steps, {at_first:g} at most", first, at_first)
    report.compared(group, f"what the last steps lack to {at_last:g}", max(0.0, at_last - last), 0.0)
    report.figure("rewards", {"": group, "first 5 steps": first, "last 10": last, "steps": len(steps)})


def compare_steps(report: Report, group: str, found: Steps, expected: Steps) -> None:
    """The first step within what float32 allows, where the answers are the same; those after it within `LATER`."""
    assert len(found) == len(expected), f"{len(found)} steps, and {len(expected)} expected"
    allowed = TOLERANCES["float32"]
    first = {"train/reward": 0.0, "train/loss": allowed["loss"], "train/grad_norm": allowed["gradient norm"]}
    for number, (one, other) in enumerate(zip(found, expected, strict=True), start=1):
        for name, tolerance in (first if number == 1 else LATER).items():
            if name in other:
                difference = abs(one[name] - other[name]) / (1 + abs(other[name]))
                report.compared(group, f"{name} of step {number}", difference, tolerance)


def check_mismatch(report: Report, group: str, steps: Steps, precision: str) -> None:
    """Whether engine and rank agree on the tokens of each step that tells of it, as an asynchronous one may not."""
    name = "mismatch/token_mult_prob_error"
    told = [step[name] for step in steps if name in step]
    report.compared(group, "mismatch of the worst step", max(told) - 1, MISMATCH[precision] - 1)
