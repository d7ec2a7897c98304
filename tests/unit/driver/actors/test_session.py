"""Which processes are a session's, and what becomes of them when its driver is killed; without Ray."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nemo_rl_mcore.driver.actors.cluster import Reaper, kill, processes_of, state_of

pytestmark = pytest.mark.stage("processes")

WRITER = "import sys, time; file = open(sys.argv[1], sys.argv[2]); print('open', flush=True); time.sleep(600)"


@pytest.fixture
def start() -> Iterator[type[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(file: Path, mode: str) -> subprocess.Popen[str]:
        file.touch()
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(file), mode], stdout=subprocess.PIPE, text=True
            )
        )
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "open\n"
        return started[-1]

    yield start  # type: ignore[misc]
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_sessions_processes_write_into_its_folder_and_readers_are_not_its_own(
    start, tmp_path: Path
) -> None:
    folder = tmp_path / "session"
    folder.mkdir()
    writer = start(folder / "log", "a")
    start(folder / "log", "r")
    start(tmp_path / "session_of_another", "a")
    assert [process.pid for _, process in processes_of(folder)] == [writer.pid]


def test_a_stopped_process_is_known_as_such_and_can_be_killed(start, tmp_path: Path) -> None:
    writer = start(tmp_path / "log", "a")
    psutil.Process(writer.pid).suspend()
    deadline = time.monotonic() + 5
    while state_of(writer.pid) != "stopped":
        assert time.monotonic() < deadline, state_of(writer.pid)
    assert kill([psutil.Process(writer.pid)]) == []
    assert state_of(writer.pid) == "gone"


def test_the_reaper_ends_a_session_whose_driver_was_killed_and_no_other(start, tmp_path: Path) -> None:
    folder = tmp_path / "session"
    folder.mkdir()
    writer, reader = start(folder / "log", "a"), start(folder / "log", "r")
    driver = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys, time; "
            "from nemo_rl_mcore.driver.actors.cluster import Reaper; "
            "reaper = Reaper('writers', sys.argv[1]); print('ready', flush=True); time.sleep(600)",
            str(folder),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "ready\n"
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert writer.wait(timeout=10) == -9
    time.sleep(0.6)  # another round
    assert reader.poll() is None


def test_a_reaper_that_is_dismissed_kills_nobody(start, tmp_path: Path) -> None:
    writer = start(tmp_path / "log", "a")
    Reaper("writers", str(tmp_path)).dismiss()
    assert writer.poll() is None
