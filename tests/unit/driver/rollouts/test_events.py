"""The log is read as it was written, whatever killed the writer, and damage is named by file and line."""

import errno
import os

import pytest
import torch
from refusals import refused

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.rollouts import events
from nemo_rl_mcore.driver.rollouts.events import (
    BEGINNING,
    EventLog,
    RunLog,
    Segment,
    Timeline,
    Token,
    read_events,
    set_aside_after,
)
from nemo_rl_mcore.driver.rollouts.ledger import Ledger, Limits
from nemo_rl_mcore.errors import FolderError, RunStoppedError
from nemo_rl_mcore.tools.replay import Rescoring, first_of_replay, require_kept, require_steps, unmixed

TOKEN = Token(0, 4, 2)
ONE_OF_EACH = [
    events.Started(incarnation=0, version=2),
    events.Dispatched(token=TOKEN, version=2),
    events.Committed(token=TOKEN, segments=(Segment(0, 2), Segment(17, 3))),
    events.Failed(token=TOKEN, reason="Zeit\nüberschritten \u2028", dropped=True),
    events.Cancelled(token=TOKEN, reason="engine lost"),
    events.Begun(step=3),
    events.Leased(step=3, positions=(4, 5)),
    events.Finishing(step=3),
    events.Finished(step=3, chunks=((4,), (5, 6))),
    events.Aborted(step=3, reason="rank 0 raised"),
    events.Lost(step=3, reason="rank 1 died"),
    events.Published(version=3),
    events.Checkpointed(step=3),
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def write(path, *some):
    with EventLog(path) as log:
        for event in some:
            log.append(event)


def test_every_event_is_read_as_it_was_written(path):
    write(path, *ONE_OF_EACH)
    assert read_events(path) == ONE_OF_EACH
    assert len(path.read_bytes().splitlines()) == len(ONE_OF_EACH)


@pytest.mark.parametrize("length", [1, 7, -2, -1])
def test_a_last_line_that_is_torn_is_cut(path, length):
    """-1: all of the line but its end."""
    write(path, *ONE_OF_EACH)
    whole, torn = path.read_bytes().rsplit(b"\n", 2)[0] + b"\n", path.read_bytes().rsplit(b"\n", 2)[1] + b"\n"
    path.write_bytes(whole + torn[:length])
    assert read_events(path) == ONE_OF_EACH[:-1]
    write(path)
    assert path.read_bytes() == whole
    write(path, ONE_OF_EACH[1])
    assert read_events(path) == [*ONE_OF_EACH[:-1], ONE_OF_EACH[1]]


def test_a_torn_line_may_be_longer_than_a_block(path):
    write(path, ONE_OF_EACH[0])
    with path.open("ab") as file:
        file.write(b"x" * 10_000)
    write(path, ONE_OF_EACH[1])
    assert read_events(path) == ONE_OF_EACH[:2]
    path.write_bytes(b"x" * 10_000)
    write(path, ONE_OF_EACH[1])
    assert read_events(path) == ONE_OF_EACH[1:2]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (b'{"kind":"begun"', "Expecting"),
        (b"", "Expecting value"),
        (b"\0\0\0", ""),
        (b"\xff", "codec"),
        (b"3", "object"),
        (b'{"step":1}', "tag"),
        (b'{"kind":"ended","step":1}', "'ended'"),
        (b'{"kind":"begun"}', "begun.step: Field required"),
        (b'{"kind":"begun","step":"1"}', "begun.step: "),
        (b'{"kind":"begun","step":-1}', "begun.step: "),
        (b'{"kind":"begun","step":1,"by":2}', "begun.by: "),
        (b'{"kind":"begun","step":1,"step":1}', "'step'"),
        (b'{"kind":"begun","step":NaN}', "NaN"),
        (b'{"kind":"committed","token":{"incarnation":0,"position":1},"segments":[]}', "token.attempt"),
    ],
)
def test_a_damaged_line_is_named(path, line, part):
    write(path, *ONE_OF_EACH)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:3], line, *lines[3:]]))
    with refused("broken-event", "events.jsonl, line 4: ", part):
        read_events(path)


def test_a_whole_last_line_that_is_damaged_is_an_error(path):
    write(path, ONE_OF_EACH[0])
    with path.open("ab") as file:
        file.write(b'{"kind":"be\n')
    with refused("broken-event", "line 2: "):
        read_events(path)


def test_the_disk_is_waited_for_when_a_step_or_a_checkpoint_has_ended(path, monkeypatch):
    synced = []
    monkeypatch.setattr(events.os, "fsync", lambda descriptor: synced.append(last))
    with EventLog(path) as log:
        for event in ONE_OF_EACH:
            last = type(event)
            log.append(event)
    assert synced == [events.Finished, events.Checkpointed]


def test_a_line_that_cannot_be_written_is_not_in_the_file(path, monkeypatch):
    real = os.pwrite

    def full_disk(descriptor, line, offset):
        real(descriptor, line[:5], offset)
        raise OSError(28, "No space left on device")

    with EventLog(path) as log:
        ledger = Ledger(Limits(2, 1, 5, 1), log.append)
        ledger.dispatch()
        monkeypatch.setattr(events.os, "pwrite", full_disk)
        with pytest.raises(OSError, match=r"No space .*: '.*events\.jsonl'"):
            ledger.dispatch()
        monkeypatch.undo()
        assert ledger.dispatch().position == 1
    assert [event.kind for event in read_events(path)] == ["started", "dispatched", "dispatched"]


def test_a_signal_in_the_wait_for_the_disk_leaves_no_part_of_a_line(tmp_path, monkeypatch):
    def interrupted(descriptor):
        raise KeyboardInterrupt

    with EventLog(tmp_path / "log") as log:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", interrupted)
            with pytest.raises(KeyboardInterrupt):
                log.append(events.Finished(step=3, chunks=(tuple(range(32)),)))
        log.append(events.Lost(step=3, reason="KeyboardInterrupt"))
    assert read_events(tmp_path / "log") == [events.Lost(step=3, reason="KeyboardInterrupt")]


def test_what_is_behind_a_mark_is_set_aside_and_the_log_goes_on_from_there(path):
    with EventLog(path) as log:
        for event in ONE_OF_EACH[:3]:
            log.append(event)
        mark = log.mark()
        for event in ONE_OF_EACH[3:]:
            log.append(event)
    with path.open("ab") as file:
        file.write(b'{"kind":"be')
    whole = path.read_bytes()
    assert set_aside_after(path, mark)
    assert read_events(path) == ONE_OF_EACH[:3]
    assert path.with_name("events.1.jsonl").read_bytes() == whole[mark.size :]
    assert set_aside_after(path, mark), "once more does nothing"
    with EventLog(path) as log:
        assert log.mark() == mark
        log.append(ONE_OF_EACH[5])
    assert set_aside_after(path, BEGINNING)
    assert (path.read_bytes(), len(read_events(path.with_name("events.2.jsonl")))) == (b"", 4)


@pytest.mark.parametrize("change", [lambda log: log[:-1], lambda log: b"x" + log[1:], lambda log: b""])
def test_a_log_that_is_not_the_one_of_a_mark_is_set_aside_as_a_whole(path, change):
    with EventLog(path) as log:
        log.append(ONE_OF_EACH[0])
        mark = log.mark()
    path.write_bytes(other := change(path.read_bytes()))
    assert not set_aside_after(path, mark)
    assert path.read_bytes() == b""
    aside = path.with_name("events.1.jsonl")
    assert aside.read_bytes() == other if other else not aside.exists()


# How a run's log is told: in a folder that takes no more, is damaged, or is not there


LIMITS = Limits(groups_per_step=1, max_age=0, last_step=3, max_attempts=1)


def test_a_step_that_is_finished_is_recorded_before_a_full_disk_ends_the_run(tmp_path, monkeypatch):
    def no_space(log, event):
        raise OSError(errno.ENOSPC, "No space left on device", "groups.jsonl")

    with RunLog(tmp_path) as log:
        ledger = Ledger(LIMITS, log.append)
        token = ledger.dispatch()
        ledger.commit(token, [Segment(0, 0)])
        ledger.begin()
        ledger.lease([0])
        ledger.finishing()
        monkeypatch.setattr(EventLog, "append", no_space)
        ledger.finish()
        assert ledger.version == 1
        with pytest.raises(FolderError, match=r"^logger.log_dir: .*: No space"):
            ledger.publish()


def test_a_log_that_is_damaged_or_a_folder_that_is_not_there_ends_the_run_by_name(tmp_path):
    (tmp_path / "groups.jsonl").write_text("nothing\n")
    with refused("broken-event", "logger.log_dir: ", "groups.jsonl, line 1", by=RunStoppedError):
        RunLog(tmp_path)
    with pytest.raises(FolderError, match=r"^logger.log_dir: .*gone"):
        RunLog(tmp_path / "gone")


# What a log says was trained, also after a resume, and which logs say what cannot be


def committed(position, *segments, incarnation=0, digest="d"):
    token = Token(incarnation, position, 1)
    return events.Committed(token=token, segments=tuple(Segment(*s) for s in segments), digest=digest)


def trained(step, *positions):
    return [
        events.Finished(step=step, chunks=(positions,)),
        events.Published(version=step, digest=f"w{step}"),
    ]


LOG = [
    events.Started(incarnation=0, version=0),
    *(committed(0, (0, 0)), committed(1, (0, 0))),
    *trained(1, 0, 1),
    *(committed(2, (0, 0), (3, 1)), committed(3, (0, 1))),
    *trained(2, 2, 3),
]


def test_a_log_says_what_each_step_trained_on():
    found = Timeline.of(LOG)
    assert found.positions(range(1, 3)) == [0, 1, 2, 3]
    assert found.weights == {1: "w1", 2: "w2"}
    assert min(found.groups[2].versions) == 0
    require_steps(found, range(1, 3), "log")


def test_steps_that_a_resume_took_back_do_not_count():
    anew = [committed(2, (0, 1), incarnation=1, digest="other"), committed(3, (0, 1), incarnation=1)]
    found = Timeline.of([*LOG, events.Started(incarnation=1, version=1), *anew])
    assert [*found.chunks] == [1]
    assert found.weights == {1: "w1"}
    assert found.groups[2].digest == "other"


@pytest.mark.parametrize("steps", [range(1, 4), range(3, 5), range(2, 2)])
def test_steps_that_the_log_does_not_have_are_refused(steps):
    with refused("missing-steps", "--steps", "1 to 2"):
        require_steps(Timeline.of(LOG), steps, "log")


@pytest.mark.parametrize(
    ("more", "told"), [(trained(3, 9), "group 9"), ([committed(4, (0, 2), (1, 3)), *trained(3, 4)], "[2, 3]")]
)
def test_a_log_that_trains_what_was_not_there_is_refused(more, told):
    with refused("untimely-group", told):
        require_steps(Timeline.of([*LOG, *more]), range(1, 4), "log")


@pytest.mark.parametrize(
    ("kept", "gone", "remedy"),
    [
        ([2, 3], "1 to 1", "step 1"),
        ([3], "1 to 2", "step 2"),
        ([1, 2], "3 to 3", "grpo.async_grpo.enabled"),
        ([], "1 to 3", "grpo.async_grpo.enabled"),
    ],
)
def test_steps_whose_groups_are_gone_are_refused(tmp_path, kept, gone, remedy):
    for step in kept:
        (tmp_path / f"step_{step}").mkdir()
    with refused("groups-gone", "--steps 0:3", gone, remedy):
        require_kept(tmp_path, range(1, 4), "grpo.async_grpo")
    require_kept(tmp_path, range(min(kept, default=1), max(kept, default=0) + 1), "grpo.async_grpo")


@pytest.mark.parametrize(
    ("starts", "kept", "begin"),
    [
        ([0, 2, 4], [3, 4, 5, 6], 2),
        ([0, 3], [3, 4, 5, 6], 3),
        ([0, 4], [1, 2, 3, 4, 5, 6], 0),
        ([0, 1, 2], [3, 4, 5, 6], 2),
    ],
)
def test_a_replay_begins_at_the_last_start_from_which_groups_are_kept(tmp_path, starts, kept, begin):
    for step in kept:
        (tmp_path / f"step_{step}").mkdir()
    assert first_of_replay(starts, range(4, 6), tmp_path) == begin + 1


def test_steps_that_no_kept_start_leads_to_are_refused_with_those_that_can_be_replayed(tmp_path):
    for step in (1, 2, 4, 5, 6, 7):
        (tmp_path / f"step_{step}").mkdir()
    with refused("no-start", "--steps 3:5", "0:2", "6:7"):
        first_of_replay([6, 0], range(4, 6), tmp_path)


# Kept tokens are rescored by the version that they name, once; one with another log-probability is named


PROMPT = 2


class Weights:
    """A policy whose log-probabilities are a formula of token and version."""

    def __init__(self):
        self.version, self.asked = 0, 0

    def get_logprobs(self, data, *, trained_only=False):
        assert trained_only
        self.asked += int(data["token_mask"].sum())
        return {"logprobs": by(self.version, data["input_ids"]) * data["token_mask"]}


def by(version, ids):
    return -0.1 * ids - 0.25 * version


def group(*versions_of_rows):
    """A group whose rows have a prompt of two tokens, and answers by these versions."""
    longest = PROMPT + max(map(len, versions_of_rows))
    versions = torch.full((len(versions_of_rows), longest), -1)
    for row, drawn in enumerate(versions_of_rows):
        versions[row, PROMPT : PROMPT + len(drawn)] = torch.tensor(drawn)
    ids = torch.arange(versions.numel()).view_as(versions)
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=torch.tensor([PROMPT + len(drawn) for drawn in versions_of_rows]),
        weight_versions=versions,
        token_mask=(versions >= 0).float(),
        generation_logprobs=by(versions, ids) * (versions >= 0),
    )


def rescored(steps, *, rereads=True, first_version=0, last_version=2):
    policy = Weights()
    rescoring = Rescoring(policy, 1e-4, rereads, pad_token_id=0, first_version=first_version)
    for policy.version in range(first_version, last_version + 1):
        rescoring.rescore(
            policy.version, {step: groups for step, groups in steps.items() if step > policy.version}
        )
    found = [rescoring.take(step) for step in steps]
    assert policy.asked == sum(one.tokens for one in found)
    return found


def test_each_token_is_rescored_by_its_version():
    first, second = rescored(
        {2: {4: group([0, 0], [0, 1, 1])}, 3: {6: group([1, 2], [2]), 7: group([1, 1, 1])}}, last_version=2
    )
    assert (first.tokens, first.older, first.cached) == (5, 0, 0)
    assert (second.tokens, second.older, second.cached) == (6, 0, 0)
    assert max(first.largest, second.largest) < 1e-5


def test_tokens_of_weights_that_are_not_passed_and_behind_other_ones_in_a_cache_are_counted():
    [found] = rescored({3: {6: group([0, 1, 2], [1, 1, 2], [2])}}, rereads=False, first_version=1)
    assert (found.tokens, found.older, found.cached) == (3, 1, 3)
    assert all(str(number) in str(found) for number in (3, 1))
    [found] = rescored({3: {6: group([0, 1, 2], [1, 1, 2], [2])}}, first_version=1)
    assert (found.tokens, found.older, found.cached) == (6, 1, 0)


def test_a_turn_reads_what_came_before_it_anew():
    episode = group([0, 0, 1, 1, 2], [0, 1, 1, 1, 1])
    episode["turn_of_token"] = torch.tensor([[0, 0, 1, 1, 2, 2, 2], [0, 0, 1, 1, 2, 2, 2]])
    assert unmixed(episode)[:, PROMPT:].tolist() == [
        [True, True, True, True, False],
        [True, False, True, True, True],
    ]


@pytest.mark.parametrize(("rereads", "change"), [(True, 0.01), (False, 0.01), (True, torch.nan)])
def test_a_log_probability_that_was_changed_is_named(rereads, change):
    broken = group([0, 0], [0, 0, 0])
    broken["generation_logprobs"][1, PROMPT + 1] += change
    kept, now = float(broken["generation_logprobs"][1, 3]), float(by(0, broken["input_ids"][1, 3]))
    with refused("rescored-differs", "step 2", "group 5", "row 1", "token 3", f"{kept:.6g}", f"{now:.6g}"):
        rescored({2: {4: group([0, 1]), 5: broken}}, rereads=rereads)


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_version_that_did_not_draw_a_token_is_named(wrong):
    broken = group([1, 1], [1, 1])
    broken["weight_versions"][0, PROMPT] = wrong
    with refused("rescored-differs", "step 3", "group 6", "row 0", f"token {PROMPT}", f"version {wrong}"):
        rescored({3: {6: broken}})
