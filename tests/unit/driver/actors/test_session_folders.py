"""What sessions leave behind in the folder for temporary files, and which of it may go."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_rl_mcore.driver.actors.local_session import LocalSession
from nemo_rl_mcore.driver.actors.session_folders import SessionFolder

pytestmark = pytest.mark.stage("processes")

WEEKS_AGO = time.time() - 30 * 24 * 3600
HOLDS = """
import os, sys
from pathlib import Path
from nemo_rl_mcore.driver.actors.session_folders import SessionFolder
print(SessionFolder(Path(sys.argv[1])).path, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""


def left_behind(parent: Path, name: str = "nemo_rl_mcore_x", written: float = WEEKS_AGO) -> Path:
    folder = parent / name
    (folder / "ray/logs").mkdir(parents=True)
    os.utime(folder, (written, written))
    return folder


def test_what_a_dead_run_left_weeks_ago_goes_with_the_next_start(tmp_path: Path) -> None:
    old, recent = left_behind(tmp_path), left_behind(tmp_path, "nemo_rl_mcore_y", time.time() - 3600)
    other = left_behind(tmp_path, "other")
    new = SessionFolder(tmp_path)
    assert not old.exists()
    assert recent.exists()  # whoever reads of a failed run looks there
    assert other.exists()
    assert new.path.stat().st_mode & 0o777 == 0o700


def test_a_folder_goes_once_its_process_is_dead(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", HOLDS, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with run:
        assert run.stdout is not None
        folder = Path(run.stdout.readline().strip())
        os.utime(folder, (WEEKS_AGO, WEEKS_AGO))
        SessionFolder(tmp_path).release()
        assert folder.exists()
        run.communicate("\n")
    os.utime(folder, (WEEKS_AGO, WEEKS_AGO))
    SessionFolder(tmp_path).release()
    assert not folder.exists()


def test_a_folder_that_somebody_writes_into_stays(tmp_path: Path) -> None:
    folder = left_behind(tmp_path)
    with (folder / "ray/logs/raylet.out").open("w") as log:
        writes = subprocess.Popen(["sleep", "60"], stdout=log)
    os.utime(folder, (WEEKS_AGO, WEEKS_AGO))
    try:
        SessionFolder(tmp_path).release()
        assert folder.exists()
    finally:
        writes.kill()
        writes.wait()


def test_a_link_is_neither_followed_nor_removed(tmp_path: Path) -> None:
    (kept := tmp_path / "kept").mkdir()
    (kept / "file").touch()
    link = tmp_path / "nemo_rl_mcore_link"
    link.symlink_to(kept)
    os.utime(link, (WEEKS_AGO, WEEKS_AGO), follow_symlinks=False)
    SessionFolder(tmp_path).release()
    assert link.is_symlink()
    assert (kept / "file").exists()


def test_a_session_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    old = left_behind(tmp_path)
    LocalSession().end(keep_logs=False)
    assert not old.exists()
    assert [*tmp_path.iterdir()] == []
