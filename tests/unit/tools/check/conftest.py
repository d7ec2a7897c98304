import pytest
from hidden_packages import Doctor


@pytest.fixture
def doctor(tmp_path):
    return Doctor(tmp_path)


@pytest.fixture
def packages(monkeypatch):
    """`packages(*names)`: no other ones are installed."""
    machine = "nemo_rl_mcore.tools.check.machine.installed"
    return lambda *names: monkeypatch.setattr(machine, lambda package: package in names)
