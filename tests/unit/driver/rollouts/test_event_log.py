"""The log is read as it was written, whatever killed the writer, and damage is named by file and line."""

import os
from itertools import pairwise

import pytest
from refusals import refused

from nemo_rl_mcore.driver.rollouts import events
from nemo_rl_mcore.driver.rollouts.events import (
    BEGINNING,
    EventLog,
    Segment,
    Token,
    read_events,
    set_aside_after,
)
from nemo_rl_mcore.driver.rollouts.ledger import Ledger, Limits

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


def test_a_log_grows_by_as_much_at_every_step(path):
    sizes = []
    with EventLog(path) as log:
        ledger = Ledger(Limits(4, 1, 60, 1), log.append)
        for _ in range(60):
            while ledger.may_dispatch():
                ledger.commit(ledger.dispatch(), [Segment(0, ledger.published)])
            ledger.begin()
            ledger.lease(ledger.leasable())
            ledger.finishing()
            ledger.finish()
            ledger.publish()
            sizes.append(path.stat().st_size)
    grown = [later - earlier for earlier, later in pairwise(sizes)]
    digits = 4 * 8 + 8  # that the numbers are longer by
    assert max(grown[40:55]) <= max(grown[5:20]) + digits
    assert max(grown) < 3000


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
