"""Sessions whose raylet dies while they start; a script of that name stands for it."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from ray._private import services

from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.workers.cluster import RayCluster
from nemo_rl_mcore.workers.raylet_watch import RayletDiedError, watched_raylet

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
    with pytest.raises(RayletDiedError, match=r"raylet \(pid \d+\) died .*Timed out waiting for file"):
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


@pytest.mark.exhaustive
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # Ray waits for none of its processes
def test_a_session_whose_raylet_died_is_started_once_more(
    raylet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    works = services.RAYLET_EXECUTABLE
    monkeypatch.setattr(services, "RAYLET_EXECUTABLE", str(raylet))
    begin, reported = time.monotonic(), list[str]()

    def restore(_to: object, line: str) -> None:
        services.RAYLET_EXECUTABLE = works
        reported.append(line)

    monkeypatch.setattr("nemo_rl_mcore.workers.cluster.write_line", restore)
    with RayCluster(ClusterConfig(cpu_workers_per_node=1)):
        [line] = reported
    assert "Timed out waiting for file" in line
    assert time.monotonic() - begin < 25
