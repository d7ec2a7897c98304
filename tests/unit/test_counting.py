"""A run of tests that costs more than its file of counts allows fails, and says what is more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from counting import ALLOWED, CPU, exceeded

pytestmark = pytest.mark.exhaustive  # of the counter itself

TESTS = Path(__file__).parents[1]
SUITE = """
import subprocess, sys

def test_reads_a_recipe(tmp_path):
    (tmp_path / "one.yaml").write_text("")
    subprocess.run([sys.executable, "-c", f"open({str(tmp_path / 'one.yaml')!r})"], check=True)
"""


@pytest.mark.parametrize(("allowed", "status"), [(1, 0), (0, 1)])
def test_what_child_processes_do_is_counted_and_compared(tmp_path, allowed, status):
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(
        "import pathlib, counting\n"
        "def pytest_addoption(parser): parser.addoption('--counts', type=pathlib.Path)\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(counting.Counts(config.getoption('--counts')))\n"
    )
    (tmp_path / "counts.json").write_text(json.dumps({"recipe files read": allowed, CPU: 1e9}))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--counts", "counts.json", "--rootdir", "."],
        cwd=tmp_path, env={"PYTHONPATH": str(TESTS)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    assert ("recipe files read: 1, and 0 are recorded" in done.stdout) == bool(status)


def test_counts_have_no_room_and_seconds_have_some():
    recorded = {"Ray sessions": 2, CPU: 100.0}
    assert exceeded({"Ray sessions": 2, CPU: 100.0 * ALLOWED}, recorded) == []
    more = exceeded({"Ray sessions": 3, CPU: 100.0 * ALLOWED + 1, "Megatron imports": 1}, recorded)
    assert len(more) == 3
