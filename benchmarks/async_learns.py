"""Asynchronous rollouts learn as synchronous ones do, in every algorithm: a table, and status 1 where one does not.

    python benchmarks/async_learns.py FOLDER [--seeds 3] [--ages 1 2]

Each case is an asynchronous recipe for a CPU, maybe with overrides. It runs with `enabled: false`, which is the
synchronous run on the same engine and ranks, and with each largest staleness. A run has learned if its reward over the
last tenth of its steps is above that of the first, and no more than `BELOW` under the synchronous run of its seed. A
finished run in FOLDER is not run again.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nemo_rl_mcore.driver.observability import read_history
from nemo_rl_mcore.recipe.load import load_config

CONFIGS = Path(__file__).parents[1] / "examples/configs"
BELOW = 0.05
FIRST_RUNS = {
    "ppo_async_cpu": ("sft_cpu", 80, "policy.init_checkpoint"),
    "dpo_async_cpu": ("sft_cpu", 80, "policy.init_checkpoint"),
    "distillation_async_cpu": ("sft_teacher_cpu", 400, "teacher.init_checkpoint"),
}
"""The recipes whose last weights a run begins with or learns from, their last steps, and what names the weights."""


@dataclass(frozen=True)
class Case:
    name: str
    recipe: str
    overrides: tuple[str, ...] = ()

    def command(self, log_dir: Path, seed: int, age: int | None) -> list[str]:
        path = CONFIGS / f"{self.recipe}.yaml"
        config = load_config(path)
        section = config.key("asynchrony")
        beside = f"{section}.enabled=false" if age is None else f"{section}.max_trajectory_age_steps={age}"
        overrides = [*self.overrides, beside, f"seed={seed}", f"logger.log_dir={log_dir}"]
        overrides += ["checkpointing.enabled=false"]
        return [sys.executable, "-m", "nemo_rl_mcore", config.algorithm, "--config", str(path), *overrides]


CASES = (
    Case("grpo", "grpo_copy_async_cpu"),
    Case("grpo, two optimizer steps", "grpo_copy_async_cpu", ("policy.train_global_batch_size=128",)),
    Case("grpo, dynamic sampling", "grpo_copy_async_cpu", ("grpo.use_dynamic_sampling=true",)),
    Case("ppo", "ppo_async_cpu"),
    Case("dpo", "dpo_async_cpu"),
    Case("distillation", "distillation_async_cpu"),
)


@dataclass(frozen=True)
class Outcome:
    """Mean rewards of the first and the last tenth of the steps of a run, and the share of right held-out answers."""

    first: float
    last: float
    held_out: float

    @classmethod
    def of(cls, log_dir: Path) -> "Outcome":
        rows = read_history(log_dir)
        rewards = [row["train/reward"] for row in rows if "train/reward" in row]
        held_out = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
        tenth = max(1, len(rewards) // 10)
        return cls(
            _mean(rewards[:tenth]), _mean(rewards[-tenth:]), held_out[-1] if held_out else float("nan")
        )

    def learned_as(self, synchronous: "Outcome") -> bool:
        return self.last > self.first and self.last >= synchronous.last - BELOW


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def outcome(folder: Path, case: Case, seed: int, age: int | None) -> Outcome:
    stem = f"{case.name.replace(', ', '_').replace(' ', '_')}-seed{seed}"
    log_dir = folder / f"{stem}-{'synchronous' if age is None else f'age{age}'}"
    if not (log_dir / "done").exists():
        shutil.rmtree(log_dir, ignore_errors=True)
        with (folder / f"{log_dir.name}.log").open("w") as log:
            given = first_weights(folder, case.recipe, seed, log)
            command = [*case.command(log_dir, seed, age), *given]
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
        (log_dir / "done").touch()
    return Outcome.of(log_dir)


def first_weights(folder: Path, recipe: str, seed: int, log: IO[str]) -> list[str]:
    """Train what a recipe begins with, unless that was done, the same for each staleness; returns its override."""
    if recipe not in FIRST_RUNS:
        return []
    first, last, key = FIRST_RUNS[recipe]
    run = folder / f"{first}-seed{seed}"
    overrides = [f"seed={seed}", f"logger.log_dir={run}", "checkpointing.enabled=true"]
    command = [sys.executable, "-m", "nemo_rl_mcore", "sft", "--config", str(CONFIGS / f"{first}.yaml")]
    subprocess.run([*command, *overrides], check=True, stdout=log, stderr=subprocess.STDOUT)
    return [f"{key}={run}/checkpoints/step_{last}"]


def rows_of(case: Case, folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    for seed in range(42, 42 + options.seeds):
        synchronous = outcome(folder, case, seed, None)
        for age in (None, *options.ages):
            found = synchronous if age is None else outcome(folder, case, seed, age)
            learned = found.last > found.first if age is None else found.learned_as(synchronous)
            shown = "turns" if age is None else str(age)
            line = f"| {case.name} | {seed} | {shown} | {found.first:.3f} | {found.last:.3f} | {found.held_out:.3f} |"
            yield f"{line} {'yes' if learned else 'NO'} |", learned


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ages", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.reconfigure(line_buffering=True)
    sys.stdout.write("| case | seed | K | reward, first steps | last steps | held out, right | learned |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- | --- | --- |\n")
    failed = 0
    for case in CASES:
        for line, learned in rows_of(case, options.folder.absolute(), options):
            sys.stdout.write(f"{line}\n")
            failed += not learned
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
