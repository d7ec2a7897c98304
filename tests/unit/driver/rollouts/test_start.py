"""How a run's log is told: in a folder that takes no more, is damaged, or is not there."""

import errno

import pytest
from refusals import refused

from nemo_rl_mcore.driver.rollouts.events import EventLog, RunLog, Segment
from nemo_rl_mcore.driver.rollouts.ledger import Ledger, Limits
from nemo_rl_mcore.errors import FolderError, RunStoppedError

LIMITS = Limits(groups_per_step=1, max_age=0, last_step=3, max_attempts=1)


def full(monkeypatch):
    def no_space(log, event):
        raise OSError(errno.ENOSPC, "No space left on device", "groups.jsonl")

    monkeypatch.setattr(EventLog, "append", no_space)


def test_a_full_disk_is_told_by_its_key(tmp_path, monkeypatch):
    with RunLog(tmp_path) as log:
        ledger = Ledger(LIMITS, log.append)
        full(monkeypatch)
        with pytest.raises(FolderError, match=r"^logger.log_dir: .*: No space"):
            ledger.dispatch()


def test_a_step_that_is_finished_is_recorded_before_a_full_disk_ends_the_run(tmp_path, monkeypatch):
    with RunLog(tmp_path) as log:
        ledger = Ledger(LIMITS, log.append)
        token = ledger.dispatch()
        ledger.commit(token, [Segment(0, 0)])
        ledger.begin()
        ledger.lease([0])
        ledger.finishing()
        full(monkeypatch)
        ledger.finish()
        assert ledger.version == 1
        with pytest.raises(FolderError, match="No space"):
            ledger.publish()


def test_a_log_that_is_damaged_or_a_folder_that_is_not_there_ends_the_run_by_name(tmp_path):
    (tmp_path / "groups.jsonl").write_text("nothing\n")
    with refused("broken-event", "logger.log_dir: ", "groups.jsonl, line 1", by=RunStoppedError):
        RunLog(tmp_path)
    with pytest.raises(FolderError, match=r"^logger.log_dir: .*gone"):
        RunLog(tmp_path / "gone")
