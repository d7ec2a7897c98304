"""The first recipe on one GPU, by the command and through Ray: it learns, saves, resumes, and computes what a CPU does.

With `--device cpu` both are the CPU, for as many steps as show that rewards rise.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from report import Report
from runs import Steps, check_rewards, compare_steps, grpo
from trained_worker import TOLERANCES

RECIPE = "grpo_copy_cpu.yaml"
# Transformer Engine's layers are not those that the CPU has.
LAYERS = "policy.megatron_cfg.transformer_impl=local"


@dataclass(frozen=True)
class Length:
    """Of the run that learns: its steps, the reward that the last ones reach, and of the bfloat16 run after it."""

    steps: int
    reward: float
    bfloat16_steps: int


LENGTHS = {"cuda": Length(300, 0.9, 100), "cpu": Length(60, 0.15, 40)}


def run(report: Report, device: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        check_learning(report, folder / "learning", device)
        check_first_steps(report, folder, device)
        check_bfloat16(report, folder / "bfloat16", device)


def check_first_steps(report: Report, folder: Path, device: str) -> None:
    """Three steps on the CPU and three on the device, from what `check_learning` has saved half-way."""
    group, half = "the first steps as on the CPU", LENGTHS[device].steps // 2
    weights = f"policy.init_checkpoint={folder}/learning/checkpoints/step_{half}"
    settings = (weights, "grpo.max_num_steps=3", LAYERS)
    with report.attempt(group, "three steps on the CPU"):
        expected = grpo(RECIPE, folder / "expected", "cpu", *settings)
        report.doing(f"{group}: three steps on the device")
        found = grpo(RECIPE, folder / "found", device, *settings)
        compare_steps(report, group, found, expected)
        for number, step in enumerate(found, start=1):
            likely, allowed = abs(step["mismatch/token_mult_prob_error"] - 1), TOLERANCES["float32"]
            report.compared(
                group, f"sampled as trained in step {number}", likely, allowed["log-probabilities"]
            )


def check_learning(report: Report, folder: Path, device: str) -> None:
    """Half of the steps, then, from the checkpoint, the others."""
    group, length = "float32: learns, saves and resumes", LENGTHS[device]
    half = length.steps // 2
    saving = ("checkpointing.enabled=true", f"checkpointing.save_period={half}")
    settings = (LAYERS, *saving, f"checkpointing.checkpoint_dir={folder}/checkpoints")
    with report.attempt(group, "the first half"):
        before = grpo(RECIPE, folder, device, f"grpo.max_num_steps={half}", *settings)
        report.doing(f"{group}: the second half")
        whole = grpo(RECIPE, folder, device, f"grpo.max_num_steps={length.steps}", *settings)
        check_resumed(report, group, before, whole, length.steps)
        check_rewards(report, group, whole, 0.1, length.reward)


def check_resumed(report: Report, group: str, before: Steps, whole: Steps, steps: int) -> None:
    missing = set(range(1, steps + 1)).symmetric_difference(int(step["step"]) for step in whole)
    report.compared(group, "steps that are missing", float(len(missing)), 0.0)
    again = sum(old != new for old, new in zip(before, whole, strict=False))
    report.compared(group, "steps of the first half that were done again", float(again), 0.0)


def check_bfloat16(report: Report, folder: Path, device: str) -> None:
    """With `transformer_impl: auto`, so with Transformer Engine where it is installed."""
    group, steps = "bfloat16: learns", LENGTHS[device].bfloat16_steps
    with report.attempt(group, "a run"):
        settings = (f"grpo.max_num_steps={steps}", "policy.precision=bfloat16")
        check_rewards(report, group, grpo(RECIPE, folder, device, *settings), 0.1, 0.1)
