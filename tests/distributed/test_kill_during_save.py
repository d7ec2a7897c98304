import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill_during_save.py")


@pytest.mark.exhaustive
def test_ranks_killed_during_a_save_leave_a_checkpoint_to_go_on_from():
    run = subprocess.run(
        [sys.executable, SCRIPT, "--kills", "5"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("5 kills of 2 ranks"), run.stdout
