"""Kill training ranks with SIGKILL while they save, over and over, and go on from what is left.

  python tests/distributed/kill_during_save.py --kills 100 --ranks 2

Each round forks ranks that load the newest checkpoint, check every bit of it against what its writers noted before they
wrote, and then train and save until they are killed at a random moment: all at once, or one before the others.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

KEPT = 2
DEADLINE_S = 120.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args(arguments)
    _prepare()
    with tempfile.TemporaryDirectory() as folder:
        found = Counter(_round(Path(folder), options.ranks) for _ in range(options.kills))
        _round(Path(folder), options.ranks, check_only=True)
    moments = ", ".join(f"{count} {moment}" for moment, count in sorted(found.items()))
    sys.stdout.write(
        f"{options.kills} kills of {options.ranks} ranks ({moments}): the newest checkpoint was always whole\n"
    )
    return 0


def _prepare() -> None:
    """Import once what every rank needs: forked ranks have it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(Path(__file__).parent))
    import torch

    from nemo_rl_mcore.rank import accelerator

    torch.set_num_threads(1)
    accelerator.install(0)
    import tiny  # noqa: F401
    import worker_state  # noqa: F401


def _round(folder: Path, ranks: int, *, check_only: bool = False) -> str:
    """Start ranks, kill them while they save; where they were then. Raises when what they loaded was not right."""
    from nemo_rl_mcore.driver.checkpoints import CheckpointStore

    store = CheckpointStore(folder / "checkpoints")
    before = store.latest()
    rendezvous = folder / f"rendezvous_{time.monotonic_ns()}"
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    processes = [
        fork.Process(target=_train, args=(rank, ranks, folder, rendezvous, theirs, check_only), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    theirs.close()
    saved, moment = _kill_at_random(processes, ours, check_only)
    latest = store.latest()
    assert saved is None or (latest is not None and latest.step >= saved), (
        f"step {saved} was saved and is gone"
    )
    assert before is None or (latest is not None and latest.step >= before.step), (
        "an older checkpoint is the newest"
    )
    return moment


def _kill_at_random(processes: list[Any], pipe: Connection, check_only: bool) -> tuple[int | None, str]:
    """The last step that was saved for sure, and what the ranks did when they died."""
    saved, duration = _wait_for_a_moment(pipe, check_only)
    time.sleep(random.uniform(0, 1.2) * duration)
    first = random.sample(processes, random.randint(1, len(processes)))
    for process in first:
        os.kill(process.pid, signal.SIGKILL)
    if len(first) < len(processes):
        time.sleep(random.uniform(0, duration))
    for process in processes:
        process.kill()
        process.join()
    late = [step for message, step, _ in _left_in(pipe) if message == "saved"]
    return (late[-1], "just after") if late else (saved, "while saving")


def _wait_for_a_moment(pipe: Connection, check_only: bool) -> tuple[int | None, float]:
    """Wait until a save has begun, or all is loaded; the last step that was saved, and how long a save takes."""
    saves_before_death = random.randint(1, 2)
    saved, duration = None, 0.05
    while True:
        assert pipe.poll(DEADLINE_S), "the ranks hang"
        message, step, seconds = pipe.recv()
        assert message != "failed", step
        if message == "saved":
            saved, duration = step, seconds
        saves_before_death -= message == "saving"
        if not saves_before_death or (check_only and message == "loaded"):
            return saved, duration


def _left_in(pipe: Connection) -> Iterator[tuple[str, int, float]]:
    while pipe.poll(0):
        try:
            yield pipe.recv()
        except EOFError:
            return


def _train(rank: int, ranks: int, folder: Path, rendezvous: Path, pipe: Connection, check_only: bool) -> None:
    try:
        _load_then_save_for_ever(rank, ranks, folder, rendezvous, pipe, check_only)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the script shows it
        pipe.send(("failed", f"rank {rank}: {error!r}", 0.0))


def _load_then_save_for_ever(
    rank: int, ranks: int, folder: Path, rendezvous: Path, pipe: Connection, check_only: bool
) -> None:
    import tiny
    import torch.distributed as dist

    from nemo_rl_mcore.driver.checkpoints import CheckpointStore, Retention
    from nemo_rl_mcore.rank.checkpoints import POLICY_FOLDER

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    worker = tiny.worker(tiny.policy_config())
    store = CheckpointStore(folder / "checkpoints", Retention(keep=KEPT))
    latest = store.latest()
    step = latest.step if latest is not None else 0
    if latest is not None:
        worker.load_checkpoint(str(latest.folder / POLICY_FOLDER))
        assert _digest(worker) == (folder / f"digest_{step}_{rank}").read_text(), (
            f"step {step} is not what was saved"
        )
    if rank == 0:
        store.begin_after(step)
        pipe.send(("loaded", step, 0.0))
    while not check_only:
        step += 1
        worker.train(tiny.shard(tiny.grpo_batch(seed=step)), tiny.grpo_loss())
        (folder / f"digest_{step}_{rank}").write_text(_digest(worker))
        dist.barrier()
        if rank != 0:
            worker.save_checkpoint(str(store.root / f"tmp_step_{step}" / "policy"))
            continue
        pipe.send(("saving", step, 0.0))
        started = time.monotonic()
        target = store.begin(step) / "policy"
        target.mkdir()
        worker.save_checkpoint(str(target))
        store.commit(step, {}, {})
        pipe.send(("saved", step, time.monotonic() - started))


def _digest(worker: Any) -> str:
    import worker_state

    tensors = worker_state._tensors(worker)
    lasting = sorted(name for name in tensors if not name.startswith("gradient"))
    whole = hashlib.sha256()
    for name in lasting:
        whole.update(name.encode() + tensors[name].detach().numpy().tobytes())
    return whole.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
