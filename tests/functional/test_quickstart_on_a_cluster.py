"""The quick start on a cluster that was there before, whose workers run in another folder than the driver."""

import runpy
from pathlib import Path

import pytest
from raylets import Raylets

SCRIPT = Path(__file__).parents[1] / "learning/quickstart.py"


@pytest.mark.nightly
def test_every_command_of_the_quick_start_works_there(tmp_path, monkeypatch):
    (tmp_path / "of_the_cluster").mkdir()
    monkeypatch.chdir(tmp_path / "of_the_cluster")
    with Raylets(head_cpus=2) as head:
        for key, value in head.environment.items():
            monkeypatch.setenv(key, value)
        assert runpy.run_path(str(SCRIPT))["main"]([str(tmp_path / "of_the_driver")]) == 0
