"""How a run's log begins and goes on: with drops behind it, and in a folder that takes no more."""

import errno
from dataclasses import replace

import pytest
from ledger_check import check
from refusals import refused

from nemo_rl_mcore.driver.rollouts import events
from nemo_rl_mcore.driver.rollouts.event_log import EventLog, RunLog
from nemo_rl_mcore.driver.rollouts.events import Segment
from nemo_rl_mcore.driver.rollouts.ledger import Ledger
from nemo_rl_mcore.driver.rollouts.start import resumed_ledger
from nemo_rl_mcore.driver.rollouts.states import Limits
from nemo_rl_mcore.driver.rollouts.timeline import Timeline
from nemo_rl_mcore.errors import FolderError, RunStoppedError

LIMITS = Limits(groups_per_step=1, max_age=0, last_step=3, max_attempts=1)


def train(ledger):
    token = ledger.dispatch()
    ledger.commit(token, [Segment(0, ledger.version)], f"group {token.position}")
    ledger.begin()
    ledger.lease(ledger.leasable())
    ledger.finishing()
    ledger.finish()
    ledger.publish()
    return token


def test_a_resume_goes_on_behind_what_was_trained_also_after_a_drop(tmp_path):
    with RunLog(tmp_path) as log:
        first = resumed_ledger(LIMITS, log, 0)
        first.fail(first.dispatch(), "bad")
        assert train(first).position == 1
        train(first)
    with RunLog(tmp_path) as log:
        second = resumed_ledger(
            LIMITS, log, 1
        )  # from the checkpoint of step 1: the second step is taken back
        token = train(second)
        assert (token.position, token.incarnation) == (2, 1)
        check(second)
    with RunLog(tmp_path) as log:
        assert Timeline.of(log.before).positions(range(1, 3)) == [1, 2]
        assert resumed_ledger(LIMITS, log, 2).incarnation == 2


def test_a_resume_without_drops_or_without_its_log_counts_steps(tmp_path):
    with RunLog(tmp_path) as log:
        assert resumed_ledger(LIMITS, log, 2).cursor == 2


@pytest.mark.parametrize("groups", [2, 3])
def test_a_log_of_steps_of_another_size_says_nothing_of_drops(tmp_path, groups):
    """As where a run that was saved without groups goes on with other steps: its prompts begin with the next one."""
    with RunLog(tmp_path) as log:
        first = resumed_ledger(replace(LIMITS, groups_per_step=2), log, 0)
        first.fail(first.dispatch(), "bad")
        for token in [first.dispatch(), first.dispatch()]:
            first.commit(token, [Segment(0, 0)])
        first.begin()
        first.lease(first.leasable())
        first.finishing()
        first.finish()
    with RunLog(tmp_path) as log:
        again = resumed_ledger(replace(LIMITS, groups_per_step=groups), log, 1)
        assert (again.cursor, again.dropped.total(), again.incarnation) == (3, int(groups == 2), 1)
        check(again)


def full(monkeypatch):
    def no_space(log, event):
        raise OSError(errno.ENOSPC, "No space left on device", "groups.jsonl")

    monkeypatch.setattr(EventLog, "append", no_space)


def test_a_full_disk_is_told_by_its_key(tmp_path, monkeypatch):
    with RunLog(tmp_path) as log:
        ledger = resumed_ledger(LIMITS, log, 0)
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


def test_every_start_is_told_apart(tmp_path):
    for start in range(3):
        with RunLog(tmp_path) as log:
            assert resumed_ledger(LIMITS, log, 0).incarnation == start
            assert sum(isinstance(event, events.Started) for event in log.before) == start
