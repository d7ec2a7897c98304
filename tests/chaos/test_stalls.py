"""Asynchronous runs of which a part never ends: real commands, ended in time, with a line for each side."""

import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_run import ChaosRun, steps_saved

STALL_S, LIMIT_S = 8.0, 25.0
"""The key, and the seconds in which the run must have ended by it: its last save, its ranks, its report."""
BESIDE = (
    *("grpo.async_grpo.enabled=true", "policy.generation.colocated.enabled=false"),
    *("loss_fn.use_importance_sampling_correction=true", "loss_fn.truncated_importance_sampling_type=tis"),
    "loss_fn.truncated_importance_sampling_ratio=2.0",
    # Every other deadline is minutes away.
    *(f"grpo.async_grpo.stall_timeout_s={STALL_S}", "policy.call_timeout_s=600"),
)


def reward_that_sleeps(marker: Path) -> tuple[str, ...]:
    custom = f"env.custom={{type: 'chaos_parts:SleepyReward', args: {{marker: {marker}, at: 1500}}}}"
    return ("env.arithmetic=null", custom)


def loss_that(action: str, marker: Path) -> tuple[str, ...]:
    args = f"{{action: {action}, rank: 1, at: 13, marker: {marker}}}"
    return ("loss_fn.type=chaos_parts:FaultyPG", f"loss_fn.args={args}")


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="stall_"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def ended(run: ChaosRun) -> str:
    """What a run says that has struck and ends by its stall, within the limit, and leaves nothing running."""
    try:
        run.wait_until(run.marker.exists)
        struck = time.monotonic()
        status, _, errors = run.end(within_s=LIMIT_S + 30)
        assert status == 1, errors
        took = time.monotonic() - struck
        assert STALL_S - 1 <= took < LIMIT_S, (took, errors)
        assert run.watch.all_gone(within_s=15), run.watch.alive()
    finally:
        run.close()
    first = f"the run stopped: no group was answered and no step ended for {STALL_S:g} s"
    assert errors.startswith(f"{first} (grpo.async_grpo.stall_timeout_s)\n"), errors
    assert "Traceback" not in errors
    return errors


@pytest.mark.nightly
def test_a_reward_that_never_returns_has_a_deadline_of_its_own_and_the_last_step_is_saved(
    folder: Path,
) -> None:
    pool = ("+env.pool.timeout_s=5", "+env.pool.retries=0", "grpo.async_grpo.stall_timeout_s=60")
    run = ChaosRun(folder, *BESIDE, *reward_that_sleeps(folder / "struck"), *pool)
    try:
        run.wait_until(run.marker.exists)
        status, _, errors = run.end(within_s=LIMIT_S + 30)
        assert status == 1, errors
        assert run.watch.all_gone(within_s=15), run.watch.alive()
    finally:
        run.close()
    assert re.search(r"^the run stopped: step \d+: \d+ of \d+ episodes .* were dropped", errors, re.MULTILINE)
    assert "most often: no reply within 5 s (env.pool.timeout_s)" in errors
    assert max(steps_saved(run)) == len(run.steps()) > 0


@pytest.mark.nightly
def test_an_engine_that_is_stopped_is_told_with_the_groups_that_it_has(folder: Path) -> None:
    run = ChaosRun(folder, *BESIDE)
    try:
        run.wait_for_step(6)
        [engine] = [pid for pid, title in run.watch.alive().items() if "EmbeddedEngine" in title]
        os.kill(engine, signal.SIGSTOP)
        run.marker.touch()
    except BaseException:
        run.close()
        raise
    said = ended(run)
    waits = (
        r"generation \(.* s\), taking \d+ groups at least \(.* s\), waiting for groups to train on, \d+ ready"
    )
    assert re.search(rf"^training: {waits}", said, re.MULTILINE)
    flight = rf"group \d+, attempt 0\.1 \(\d+\.\d s\) at embedded engine 0 \(host .*pid {engine}\), at '.*'"
    assert re.search(rf"^engines: groups in flight: {flight}", said, re.MULTILINE)
    assert max(steps_saved(run)) == len(run.steps()) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("action", ["sleep", "stop"])
def test_a_rank_that_hangs_is_told_long_before_its_own_deadline(folder: Path, action: str) -> None:
    said = ended(ChaosRun(folder, *BESIDE, *loss_that(action, folder / "struck")))
    assert re.search(
        r"^training: train \(\d+\.\d s\), train_microbatch \(.*policy rank .*1 ", said, re.MULTILINE
    )
    assert re.search(r"^engines: no group is in flight", said, re.MULTILINE)
