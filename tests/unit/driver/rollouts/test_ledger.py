"""What the ledger says in the cases that its state machine cannot name."""

import json
import time

import pytest
from ledger_check import check
from refusals import refused

from nemo_rl_mcore.driver.rollouts.events import Segment
from nemo_rl_mcore.driver.rollouts.ledger import Ledger, Limits


def make(n=2, max_age=1, last_step=5, max_attempts=2, **start):
    return Ledger(Limits(n, max_age, last_step, max_attempts), lambda event: None, **start)


def generate(ledger, *versions):
    """Dispatch and commit a group."""
    token = ledger.dispatch()
    first = ledger.published
    assert ledger.commit(token, [Segment(place, v) for place, v in enumerate(versions or [first])])
    return token.position


def train(ledger):
    """A whole step of groups that are ready."""
    ledger.begin()
    ledger.lease(ledger.leasable())
    ledger.finishing()
    ledger.finish()


def fill(ledger):
    while ledger.may_dispatch():
        generate(ledger)


def test_a_long_run_costs_and_holds_as_much_at_its_end_as_at_its_begin():
    ledger = make(n=64, max_age=2, last_step=300)
    kept, before = [], time.thread_time()
    for step in range(1, 301):
        fill(ledger)
        train(ledger)
        ledger.publish()
        ledger.forget(step)
        kept.append((len(ledger._groups), len(ledger._steps)))
    seconds = time.thread_time() - before
    assert {*kept[:295]} == {(128, 0)}
    assert seconds < 10  # about 0.1; a look at all positions in each call takes minutes


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((0, 1, 1, 1), "groups_per_step must be at least 1, got 0"),
        ((1, -1, 1, 1), "max_age must be at least 0, got -1"),
        ((1, 1, -1, 1), "last_step must be at least 0, got -1"),
        ((1, 1, 1, 0), "max_attempts must be at least 1, got 0"),
    ],
)
def test_limits_are_checked(limits, message):
    with pytest.raises(ValueError, match=message):
        Limits(*limits)


# Saved and resumed


def saved_run():
    """Version 1; groups 2 and 4 are ready, 3 was dropped, 5 is under way and has failed once."""
    ledger = make(n=2, max_age=2, max_attempts=2)
    generate(ledger)
    generate(ledger)
    train(ledger)
    ledger.publish()
    generate(ledger)
    for _ in range(2):
        ledger.fail(ledger.dispatch(), "timeout")
    generate(ledger)
    ledger.fail(ledger.dispatch(), "timeout")
    ledger.dispatch()
    check(ledger)
    return json.loads(json.dumps(ledger.to_json()))


def resume(saved, n=2, max_age=2, **more):
    return Ledger.from_json(
        saved,
        Limits(n, max_age, 5, 2, groups_key="dpo.groups", age_key="dpo.age"),
        lambda event: None,
        **more,
    )


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        (lambda saved: saved.pop("cursor"), "ledger-fields", "cursor"),
        (lambda saved: saved.update(version="1"), "ledger-fields", "version"),
        (lambda saved: saved.update(more=1), "ledger-fields", "more"),
        (lambda saved: saved["groups"][0].update(attempt=-1), "ledger-fields", "groups.0.attempt"),
        (lambda saved: saved["groups"].reverse(), "ledger-order", ""),
        (lambda saved: saved["groups"].pop(), "ledger-positions", ""),
        (lambda saved: saved["dropped"].update(x=1), "ledger-positions", ""),
        (lambda saved: saved["groups"][0].update(min_version=2), "ledger-versions", ""),
        (lambda saved: saved["dropped"].update({"": 0}), "ledger-fields", "dropped"),
    ],
)
def test_a_damaged_save_is_refused(change, code, field):
    saved = saved_run()
    change(saved)
    with refused(code, field):
        resume(saved)


def test_limits_that_a_run_cannot_go_on_with_are_refused():
    saved = saved_run()
    with refused("groups-per-step", "dpo.groups", 3, 2):
        resume(saved, n=3)
    saved["groups"][1]["min_version"] = 0
    with refused("trajectory-age", "dpo.age", 0):
        resume(saved, max_age=0)
    with refused("incarnation", 0):
        resume(saved, incarnation=0)
    check(resume(saved, max_age=1))


def test_a_lower_age_is_refused_that_ready_groups_would_pass_before_their_turn():
    """The last one is trained two steps later, and is as new as the weights now."""
    ledger = make(n=1, max_age=2)
    fill(ledger)
    saved = ledger.to_json()
    check(resume(saved, n=1, max_age=2))
    with refused("trajectory-age", "dpo.age", 1):
        resume(saved, n=1, max_age=1)
