"""`nemo-rl-mcore grpo` in a process of its own, on the copy task; or another algorithm, on its recipe."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from processes import ProcessWatch

RECIPE = Path(__file__).parents[1] / "examples/configs/grpo_copy_cpu.yaml"


class Run:
    def __init__(
        self, log_dir: Path, *overrides: str, algorithm: str = "grpo", recipe: Path = RECIPE
    ) -> None:
        self.log_dir, self.watch = log_dir, ProcessWatch()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", "import sys; from nemo_rl_mcore.cli import main; sys.exit(main())"),
                *(
                    algorithm,
                    "--config",
                    str(recipe),
                    f"logger.log_dir={log_dir}",
                    f"{algorithm}.val_period=0",
                    *overrides,
                ),
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

    def close(self) -> None:
        """Kill what is left of it, and close its pipes: one that is left open fails another test, which it warns."""
        self.watch.kill_all()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def ranks(self) -> list[int]:
        return [pid for pid, title in self.watch.alive().items() if "MegatronPolicyWorker" in title]


def compared(run: Run) -> list[dict[str, float]]:
    """Return the rows of a run without what a synchronous and an asynchronous one do not share."""
    left_out = ("timing/", "performance/", "async/", "train/dynamic_sampling_rounds")
    return [
        {name: value for name, value in row.items() if not name.startswith(left_out)} for row in run.steps()
    ]


def teacher(folder: Path) -> str:
    """Train a teacher that has hardly learned; return the override that names it."""
    saved = ("checkpointing.enabled=true", f"checkpointing.checkpoint_dir={folder}/teacher")
    short = ("sft.max_num_steps=2", "sft.val_period=0", "sft.val_at_end=false", *saved)
    run = Run(
        folder / "teacher_log", *short, algorithm="sft", recipe=RECIPE.with_name("sft_teacher_cpu.yaml")
    )
    try:
        code, _, errors = run.end(within_s=300)
    finally:
        run.close()
    assert (code, errors) == (0, "")
    return f"teacher.init_checkpoint={folder}/teacher/step_2"
