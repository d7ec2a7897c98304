"""What is written for a person, when there is none."""

import signal
import subprocess
import sys

import pytest

from nemo_rl_mcore.output import write_line

INTERRUPTED = """
import os, signal, sys
from nemo_rl_mcore.launch import exit_status
from nemo_rl_mcore.output import write_line
def run():
    sys.stdin.read()
    write_line(sys.stdout, "nobody reads it")
    signal.raise_signal(signal.SIGINT)
sys.exit(exit_status(run))
"""


def test_a_line_is_written_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    write_line(sys.stdout, "a line")
    assert capfd.readouterr().out == "a line\n"


def test_pipes_without_a_reader_change_no_exit_status() -> None:
    """As behind `| tee` after Ctrl-C, which ends tee as well; Python itself would end with 120."""
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    process.stdin.close()
    assert process.wait(timeout=60) == 128 + signal.SIGINT
