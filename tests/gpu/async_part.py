"""vLLM's asynchronous engine on a GPU of its own: it answers while the rank trains, and weights reach it by NCCL."""

from __future__ import annotations

import tempfile
from pathlib import Path

from report import Report
from runs import Steps, check_mismatch, check_rewards, grpo, mean

RECIPE = "grpo_copy_async_vllm_cpu.yaml"
PRECISION = {"cuda": "bfloat16", "cpu": "float32"}
# Steps, and the reward of the last ones.
RUN = {"cuda": (120, 0.15), "cpu": (20, 0.03)}
ENGINE = {"cuda": ("policy.generation.colocated.resources.gpus_per_node=1",), "cpu": ()}
OLDEST = 1.0  # optimizer steps, of the recipe
EFFECTIVE = 0.9  # share of the tokens that the importance weights leave


def run(report: Report, device: str) -> None:
    precision, (steps, reward) = PRECISION[device], RUN[device]
    group = f"{precision}: asynchronous GRPO by the command"
    with report.attempt(group, "a run"), tempfile.TemporaryDirectory() as folder:
        settings = (f"grpo.max_num_steps={steps}", f"policy.precision={precision}", *ENGINE[device])
        told = grpo(RECIPE, Path(folder), device, *settings)
        check_rewards(report, group, told, 0.1, reward)
        check_mismatch(report, group, told, precision)
        check_ages(report, group, told)


def check_ages(report: Report, group: str, steps: Steps) -> None:
    """Older weights have drawn some tokens, none too old, and what they drew counts."""
    oldest = max(step["async/age_max"] for step in steps)
    report.compared(group, f"age of the oldest token, off {OLDEST:g}", abs(oldest - OLDEST), 0.0)
    least = min(step["async/ess"] for step in steps)
    report.compared(group, "share of the effective samples that is lost", 1 - least, 1 - EFFECTIVE)
    idle = {name: mean(steps, f"async/{name}") for name in ("trainer_idle", "engine_idle")}
    report.figure("share of the time in which nothing was done", {"": group, **idle})
