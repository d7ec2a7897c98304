"""`nemo-rl-mcore grpo` in a process of its own, on the copy task; or another algorithm, on its recipe."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from checkpoint_tensors import tensors_in
from processes import ProcessWatch

RECIPE = Path(__file__).parents[1] / "examples/configs/grpo_copy_cpu.yaml"


class Run:
    def __init__(
        self, log_dir: Path, *overrides: str, algorithm: str = "grpo", recipe: Path = RECIPE, before: str = ""
    ) -> None:
        """before: Python that runs in the process before the command."""
        command = f"{before}import sys; from nemo_rl_mcore.cli import main; sys.exit(main())"
        self.log_dir, self.watch = log_dir, ProcessWatch()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", command),
                *(algorithm, "--config", str(recipe), f"logger.log_dir={log_dir}"),
                *(f"{algorithm}.val_period=0", *overrides),
            ],
            env={**os.environ, **self.watch.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.watch.follow(self.process.pid)

    def steps(self) -> list[dict[str, float]]:
        path = self.log_dir / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for_step(self, step: int, within_s: float = 120) -> None:
        deadline = time.monotonic() + within_s
        while len(self.steps()) < step:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"no step {step} within {within_s} s"
            time.sleep(0.05)

    def end(self, within_s: float) -> tuple[int, str, str]:
        """Its exit status, output and errors; killed with all it started when it does not end."""
        try:
            output, errors = self.process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            self.close()
            raise
        return self.process.returncode, output, errors

    def checkpoint(self, step: int, model: str = "policy") -> dict[str, Any]:
        return tensors_in(self.log_dir / "checkpoints" / f"step_{step}" / model)

    def finish(self, within_s: float = 300) -> str:
        """Let it run to its end, which must be a good one that says nothing of errors; returns its output."""
        try:
            code, output, errors = self.end(within_s)
        finally:
            self.close()
        assert (code, errors) == (0, ""), output + errors
        return output

    def close(self) -> None:
        """Kill what is left of it, and close its pipes: one that is left open fails another test, which it warns."""
        self.watch.kill_all()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def ranks(self) -> list[int]:
        return [pid for pid, title in self.watch.alive().items() if "MegatronPolicyWorker" in title]


def numbers(run: Run, *left_out: str) -> list[dict[str, float]]:
    """Return the rows of a run without times, and without metrics whose names begin so."""
    left_out = ("timing/", "performance/", *left_out)
    return [{name: v for name, v in row.items() if not name.startswith(left_out)} for row in run.steps()]


def compared(run: Run) -> list[dict[str, float]]:
    """Return the rows of a run without what a synchronous and an asynchronous one do not share."""
    return numbers(run, "async/", "train/dynamic_sampling_rounds")


def assert_same_tensors(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    assert wanted.keys() == found.keys()
    assert not [name for name in wanted if not wanted[name].equal(found[name])]


def teacher(folder: Path) -> str:
    """Train a teacher that has hardly learned; return the override that names it."""
    saved = ("checkpointing.enabled=true", f"checkpointing.checkpoint_dir={folder}/teacher")
    short = ("sft.max_num_steps=2", "sft.val_period=0", "sft.val_at_end=false", *saved)
    recipe = RECIPE.with_name("sft_teacher_cpu.yaml")
    Run(folder / "teacher_log", *short, algorithm="sft", recipe=recipe).finish()
    return f"teacher.init_checkpoint={folder}/teacher/step_2"
