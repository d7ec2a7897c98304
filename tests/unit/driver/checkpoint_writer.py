"""Runs a store's life in a process of its own, and dies at a chosen call to the filesystem: see test_checkpoints.

checkpoint_writer.py ROOT CALL    dies before call number CALL; without a death it prints how many calls there were
"""

import itertools
import os
import sys
from pathlib import Path

from nemo_rl_mcore.driver.checkpoints import CheckpointStore, Retention

_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.unlink"}
_calls = itertools.count(1)


def write(store: CheckpointStore, step: int, reward: float) -> None:
    folder = store.begin(step)
    (folder / "config.yaml").write_text(f"step: {step}\n")
    (folder / "policy" / "weights").mkdir(parents=True)
    (folder / "policy" / "weights" / "0.distcp").write_bytes(bytes([step]) * 100)
    store.commit(step, {"train/reward": reward}, {"total": step})


def live(root: Path) -> None:
    """Two checkpoints and a leftover are there; the run goes on after step 2, writes two, and deletes the worse."""
    store = CheckpointStore(root, Retention(keep=2, metric="train/reward"))
    latest = next(store.newest_first(), None)
    store.begin_after(latest.step if latest else 0)
    for step in (3, 4):
        write(store, step, reward=float(step))


def die_at(root: Path, last_call: int) -> None:
    def audit(event: str, arguments: tuple[object, ...]) -> None:
        opened_to_write = event == "open" and arguments[1] not in ("r", "rb", None)
        opened_to_write &= str(arguments[0]).startswith(str(root))
        if (event in _CHANGES or opened_to_write) and next(_calls) == last_call:
            os._exit(137)

    sys.addaudithook(audit)


if __name__ == "__main__":
    folder, call = Path(sys.argv[1]), int(sys.argv[2])
    die_at(folder, call)
    live(folder)
    sys.stdout.write(str(next(_calls) - 1))
