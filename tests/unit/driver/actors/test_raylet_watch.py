"""Sessions whose raylet dies while they start; a script of that name stands for it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nemo_rl_mcore.driver.actors.raylet_watch import RayletDiedError, watched_raylet

pytestmark = pytest.mark.stage("processes")

Start = Callable[[], subprocess.Popen[bytes]]
DYING = """#!/bin/sh
sleep 0.5
for argument in "$@"
do
  case "$argument" in --stderr_filepath=*) exec 2>>"${argument#*=}" ;; esac
done
echo '[C 1 2] Check failed: Timed out waiting for file' >&2
exit 1
"""


@pytest.fixture
def raylet(tmp_path: Path) -> Path:
    """A raylet that dies."""
    script = tmp_path / "raylet"
    script.write_text(DYING)
    script.chmod(0o755)
    return script


@pytest.fixture
def start(raylet: Path, tmp_path: Path) -> Iterator[Start]:
    """What starts it, as Ray does."""
    started: list[subprocess.Popen[bytes]] = []
    logs = tmp_path / "session_2026/logs"
    logs.mkdir(parents=True)

    def start() -> subprocess.Popen[bytes]:
        with (logs / "raylet.err").open("wb") as errors:
            started.append(process := subprocess.Popen([raylet], stderr=errors))
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)


def start_session(start: Start, folder: Path, within_s: float, error: Exception | None = None) -> None:
    with watched_raylet(folder):
        start()
        wait(within_s)
        if error is not None:
            raise error


def test_a_dead_raylet_ends_the_wait_with_its_words(start: Start, tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(RayletDiedError, match=r"\(pid \d+\) .*Timed out"):
        start_session(start, tmp_path, 20)
    assert time.monotonic() - begin < 5
    wait(0.5)  # nothing comes behind it


def test_what_else_goes_wrong_while_the_raylet_lives_stays_as_it_is(
    start: Start, raylet: Path, tmp_path: Path
) -> None:
    raylet.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ValueError, match="no port"):
        start_session(start, tmp_path, 0.5, ValueError("no port"))
    wait(0.5)


def test_the_dead_raylet_of_an_earlier_session_is_not_looked_at(start: Start, tmp_path: Path) -> None:
    earlier = start()
    while psutil.Process(earlier.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)
    with watched_raylet(tmp_path):
        wait(0.6)


# In a process of its own: this one may have a session.
STARTS = """
import sys
from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.driver.actors import cluster
from ray._private import services
works, services.RAYLET_EXECUTABLE = services.RAYLET_EXECUTABLE, sys.argv[1]
def restore(_to, line):
    services.RAYLET_EXECUTABLE = works
    print(line)
cluster.write_line = restore
with cluster.RayCluster(ClusterConfig(cpu_workers_per_node=1)):
    print("up")
"""


@pytest.mark.exhaustive
def test_a_session_whose_raylet_died_is_started_once_more(raylet: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    run = subprocess.run(
        [sys.executable, "-c", STARTS, raylet], env=kept, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert "Timed out" in run.stdout
    assert run.stdout.endswith("up\n")
