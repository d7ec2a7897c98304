"""What becomes of a run when something dies, hangs or is full: real commands, real faults, a table.

    python tests/chaos/faults.py [--only WORD] [--tries N]

Each fault strikes a small GRPO run over two ranks (four under pipeline parallelism) that saves checkpoints. Measured
are the seconds from the fault to the end of the command, what it says, which of its processes are left after that, and
what is lost: rows of metrics that were there before, checkpoints that were whole. Exits with 1 when a fault is not told
in time or by name, leaves a process, or loses a finished step.
"""

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from chaos_run import CALL_S, LIMIT_S, PIPELINE, SMALL, ChaosRun, small_disk, steps_saved  # noqa: E402
from grpo_run import Run  # noqa: E402

AGAIN_S = 10.0


@dataclass(frozen=True)
class Fault:
    """strike: waits for its moment, and does it. says: what the end of the run must tell. status: its exit status.

    allowed_s: seconds from the fault to the end. kept: whether the last finished step must be in a checkpoint.
    """

    name: str
    strike: Callable[[ChaosRun], None]
    says: str
    status: int = 1
    overrides: tuple[str, ...] = ()
    allowed_s: float = LIMIT_S
    kept: bool = False
    short: bool = False
    small_disk: str = ""


@dataclass
class Outcome:
    """What happened."""

    seconds: float
    status: int
    said: str
    orphans: list[str]
    lost: list[str] = field(default_factory=list)

    def problems(self, fault: Fault) -> list[str]:
        found = []
        if self.seconds > fault.allowed_s:
            found.append(f"took {self.seconds:.1f} s of {fault.allowed_s:g}")
        if self.status != fault.status:
            found.append(f"exit status {self.status}, not {fault.status}")
        if not re.search(fault.says, self.said):
            found.append(f"does not say {fault.says!r}")
        if "Traceback (most recent call last)" in self.said.split("--- ")[0]:
            found.append("a bare traceback")
        return found + [f"left: {title}" for title in self.orphans] + self.lost


def loss_that(action: str, rank: int = 1) -> tuple[str, ...]:
    """A recipe whose loss goes wrong."""
    return (
        "loss_fn.type=chaos_parts:FaultyPG",
        f"loss_fn.args={{action: {action}, rank: {rank}, at: 7, marker: MARKER}}",
    )


def kill_rank(run: ChaosRun) -> None:
    os.kill(run.ranks()[-1], signal.SIGKILL)


def after(wait: Callable[[ChaosRun], None], act: Callable[[ChaosRun], None]) -> Callable[[ChaosRun], None]:
    def strike(run: ChaosRun) -> None:
        wait(run)
        act(run)

    return strike


def a_step(run: ChaosRun) -> None:
    run.wait_for_step(6)


def the_marker(run: ChaosRun) -> None:
    run.wait_until(run.marker.exists)


def gcs_killed(run: ChaosRun) -> None:
    a_step(run)
    os.kill(run.server("gcs_server"), signal.SIGKILL)


def ctrl_c(run: ChaosRun) -> None:
    """As terminals do, to the whole process group."""
    os.killpg(run.process.pid, signal.SIGINT)


def disk_filled(name: str) -> Callable[[ChaosRun], None]:
    """The folder, a small tmpfs, gets full; it is mounted by `small_disk`."""

    def strike(run: ChaosRun) -> None:
        a_step(run)
        try:
            with (run.folder / name / "filler").open("wb") as filler:
                while True:
                    filler.write(bytes(1 << 16))
                    filler.flush()
        except OSError:
            pass

    return strike


def second_run(run: ChaosRun) -> None:
    """Strikes nobody: the second run itself is the fault, and must leave the first one alone, which is then ended."""
    a_step(run)
    second = Run(run.log_dir, *SMALL, f"checkpointing.checkpoint_dir={run.checkpoints}")
    status, _, errors = second.end(within_s=60)
    run.marker.write_text(f"{status}\n{errors}")
    run.process.terminate()


FAULTS = (
    Fault(
        "rank killed while it starts",
        after(lambda run: run.wait_until(lambda: len(run.ranks()) == 2), kill_rank),
        r"rank \d .*died in MegatronPolicyWorker\(\)",
    ),
    Fault(
        "rank that hangs in the forward pass",
        the_marker,
        r"time.sleep\(EVER\)",
        overrides=loss_that("sleep"),
        allowed_s=LIMIT_S + CALL_S,
    ),
    Fault(
        "loss that raises under PP",
        the_marker,
        r"a planted fault",
        overrides=(*PIPELINE, *loss_that("raise", rank=3)),
        short=True,
    ),
    Fault("GCS killed", gcs_killed, r"Ray's gcs_server \(pid \d+\) died", short=True),
    Fault("one Ctrl-C", after(a_step, ctrl_c), r"step_\d+", status=130, kept=True, short=True),
    Fault("full disk: log_dir", disk_filled("log"), r"logger\.log_dir", small_disk="log"),
    Fault(
        "full disk: checkpoint_dir",
        disk_filled("checkpoints"),
        r"checkpointing\.checkpoint_dir|No space left on device",
        small_disk="checkpoints",
    ),
    Fault(
        "two runs in one folder",
        second_run,
        r"in use|another run|locked",
        status=143,
        kept=True,
        short=True,
    ),
)


def try_fault(fault: Fault) -> Outcome:
    """Strike one run, and see."""
    folder = Path(tempfile.mkdtemp(prefix="chaos_"))
    marker = str(folder / "struck")
    overrides = [text.replace("MARKER", marker) for text in fault.overrides]
    with small_disk(folder / fault.small_disk) if fault.small_disk else nullcontext():
        run = ChaosRun(folder, *overrides)
        try:
            fault.strike(run)
            rows, saved = run.steps(), steps_saved(run)
            began = time.monotonic()
            status, output, errors = run.end(within_s=fault.allowed_s + 60)
            seconds = time.monotonic() - began
            gone = run.watch.all_gone(within_s=AGAIN_S)
            orphans = [] if gone else [" ".join(title.split())[:80] for title in run.watch.alive().values()]
            said = (errors or output) + (run.marker.read_text() if fault.strike is second_run else "")
            return Outcome(seconds, status, said, orphans, what_is_lost(fault, run, rows, saved))
        finally:
            run.close()
            shutil.rmtree(folder, ignore_errors=True)


def what_is_lost(fault: Fault, run: ChaosRun, rows: list[dict[str, float]], saved: set[int]) -> list[str]:
    now, last = run.steps(), max(steps_saved(run), default=0)
    lost = []
    if now[: len(rows)] != rows:
        lost.append(f"of {len(rows)} rows {len(now)} are left")
    if [row["step"] for row in now] != list(range(1, len(now) + 1)):
        lost.append("rows are missing or repeated")
    if saved and last < max(saved):
        lost.append(f"checkpoint of step {max(saved)}; the last one is of {last}")
    if fault.kept and last != len(now):
        lost.append(f"the weights of step {len(now)}; the last checkpoint is of {last}")
    return lost


def headline(said: str) -> str:
    """The line that a person reads first."""
    lines = [line for line in said.splitlines() if line.strip()]
    telling = [
        line for line in lines if re.match(r"the run stopped|interrupted|terminated|hung up|time is up", line)
    ]
    return (telling or lines or [""])[0][:150]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults whose name holds this")
    parser.add_argument("--tries", type=int, default=1)
    options = parser.parse_args()
    failed = False
    print(
        "| fault | tries | seconds | exit | says | orphans | lost or wrong |\n|---|---|---|---|---|---|---|"
    )
    for fault in FAULTS:
        if options.only not in fault.name:
            continue
        outcomes = [try_fault(fault) for _ in range(options.tries)]
        wrong = [problem for outcome in outcomes for problem in outcome.problems(fault)]
        failed |= bool(wrong)
        seconds = sorted(outcome.seconds for outcome in outcomes)
        shown = f"{seconds[0]:.1f}" if len(seconds) == 1 else f"{seconds[0]:.1f} to {seconds[-1]:.1f}"
        orphans = sum(len(outcome.orphans) for outcome in outcomes)
        cells = (fault.name, len(outcomes), shown, outcomes[0].status, headline(outcomes[0].said), orphans)
        print(f"| {' | '.join(map(str, cells))} | {'; '.join(wrong) or 'nothing'} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
