"""A small run in a folder of its own, for faults to strike."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_run import Run

from nemo_rl_mcore.driver.checkpoints import CheckpointStore

LIMIT_S, CALL_S = 15.0, 8.0
"""Seconds a fault may take; the deadline of the runs' calls and collectives, which comes on top where it tells it."""
SMALL = (
    "grpo.max_num_steps=400",
    "checkpointing.enabled=true",
    "checkpointing.save_period=4",
    "checkpointing.keep_top_k=2",
    f"policy.call_timeout_s={CALL_S}",
)
PIPELINE = ("cluster.cpu_workers_per_node=4", "policy.megatron_cfg.pipeline_model_parallel_size=2")


class ChaosRun(Run):
    """A run in a folder of its own, and what can be done to it."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.marker = folder / "struck"
        os.environ["PYTHONPATH"] = str(Path(__file__).parent)
        super().__init__(
            folder / "log", *SMALL, f"checkpointing.checkpoint_dir={self.checkpoints}", *overrides
        )

    def wait_until(self, there: Callable[[], object], within_s: float = 120) -> None:
        deadline = time.monotonic() + within_s
        while not there():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "the moment for the fault did not come"
            time.sleep(0.01)

    def server(self, name: str) -> int:
        found = [pid for pid, title in self.watch.alive().items() if Path(title.split()[0]).name == name]
        return found[0]


def steps_saved(run: ChaosRun) -> set[int]:
    return {one.step for one in CheckpointStore(run.checkpoints).checkpoints()}


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of 8 MB; needs to be allowed to mount."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
