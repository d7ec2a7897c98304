"""Orders of consumption: what a step may take, and what it waits for."""

import time
from dataclasses import replace

import pytest
from refusals import refused

from nemo_rl_mcore.config.algorithm import AsyncRolloutsConfig
from nemo_rl_mcore.driver.rollouts.events import Segment
from nemo_rl_mcore.driver.rollouts.ledger import (
    ORDERS,
    GroupState,
    Ledger,
    Limits,
    SavedLedger,
)


def a_ledger(order, *, n=1, max_age, events=None):
    limits = Limits(n, max_age, last_step=20, max_attempts=1, order=order)
    return Ledger(limits, (events if events is not None else []).append)


def dispatched(ledger):
    tokens = {}
    while ledger.may_dispatch():
        token = ledger.dispatch()
        tokens[token.position] = token
    return tokens


def answer(ledger, *tokens, version=None):
    for token in tokens:
        assert ledger.commit(token, [Segment(0, ledger.published if version is None else version)])


def train(ledger):
    ledger.begin()
    trained = []
    while ledger.room():
        chunk = ledger.leasable()
        ledger.lease(chunk)
        trained += chunk
    ledger.finishing()
    ledger.finish()
    ledger.publish()
    return trained


def test_the_names_of_a_recipe_are_those_of_the_orders():
    [names] = [AsyncRolloutsConfig.model_json_schema()["properties"]["order"]["enum"]]
    assert names == [*ORDERS]


def test_in_order_a_step_waits_for_the_first_group_and_as_completed_it_takes_the_others():
    for order, taken in (("in_order", []), ("as_completed", [1, 2])):
        ledger = a_ledger(order, n=2, max_age=1)
        tokens = dispatched(ledger)
        answer(ledger, tokens[1], tokens[2])
        ledger.begin()
        assert ledger.leasable()[:2] == (taken or [1])
        assert ledger.room() == 2


def test_a_group_at_the_largest_age_is_waited_for():
    ledger = a_ledger("as_completed", n=2, max_age=1)
    tokens = dispatched(ledger)
    answer(ledger, tokens[1], tokens[2])
    assert train(ledger) == [1, 2]
    later = dispatched(ledger)
    answer(ledger, *later.values())
    ledger.begin()
    assert ledger.leasable() == []  # both places are those of 0 and 3, which no later step could train
    answer(ledger, tokens[3])
    assert ledger.leasable() == [3]
    ledger.requeue(tokens[0], "engine lost")
    assert ledger.leasable() == [3, 4]  # one that is asked for again is as new as the weights


def two_slow_groups(max_age=2):
    """Answers come at once, but for the first two prompts."""
    ledger = a_ledger("as_completed", max_age=max_age)
    slow = dispatched(ledger)
    answer(ledger, slow.pop(2))
    assert train(ledger) == [2]
    answer(ledger, *dispatched(ledger).values())
    return ledger, slow


def test_groups_that_will_reach_the_largest_age_together_are_waited_for_in_time():
    ledger, slow = two_slow_groups()
    ledger.begin()
    assert ledger.leasable() == []
    answer(ledger, slow[1])
    assert ledger.leasable() == [1]


def test_a_saved_run_as_completed_goes_on_with_groups_that_have_overtaken_others():
    ledger = a_ledger("as_completed", max_age=1)
    tokens = dispatched(ledger)
    answer(ledger, tokens[1])
    assert train(ledger) == [1]
    answer(ledger, dispatched(ledger)[2])
    saved = SavedLedger.parse(ledger.to_json(), ledger.limits)
    assert saved.ready == [2]
    again = Ledger.from_json(saved.model_dump(), ledger.limits, lambda event: None)
    assert train(again) == [2]
    assert dispatched(again).keys() == {0, 3}


def test_groups_left_out_make_room_for_the_next():
    events = []
    ledger = a_ledger("in_order", n=2, max_age=0, events=events)
    tokens = dispatched(ledger)
    answer(ledger, *tokens.values())
    ledger.unused(0, "equal rewards")
    assert ledger.reach == range(1, 3)
    more = dispatched(ledger)
    assert [*more] == [2]
    answer(ledger, more[2])
    assert train(ledger) == [1, 2]
    assert ledger.to_json()["dropped"] == {"equal rewards": 1}
    assert [event.reason for event in events if event.kind == "unused"] == ["equal rewards"]


def test_spare_groups_are_asked_for_ahead():
    ledger = Ledger(Limits(2, 0, last_step=3, max_attempts=1, spare=2), lambda event: None)
    assert ledger.reach == range(4)
    tokens = dispatched(ledger)
    assert [*tokens] == [0, 1, 2, 3]
    answer(ledger, *[tokens[position] for position in (0, 1, 2)])
    ledger.unused(1, "equal rewards")
    ledger.requeue(tokens[3], "the step is full")
    assert train(ledger) == [0, 2]
    assert [*dispatched(ledger)] == [3, 4, 5, 6]


@pytest.mark.parametrize("order", ORDERS)
def test_a_saved_group_that_is_too_old_already_is_refused(order):
    ledger = a_ledger(order, max_age=3)
    tokens = dispatched(ledger)
    answer(ledger, *tokens.values())
    for _ in range(3):
        train(ledger)
    lower = Limits(1, 1, last_step=20, max_attempts=1, order=order)
    with refused("trajectory-age", "max_trajectory_age_steps", 1):
        SavedLedger.parse(ledger.to_json(), lower)


@pytest.mark.parametrize("order", ORDERS)
def test_a_choice_among_many_groups_is_quick(order):
    ledger = a_ledger(order, n=512, max_age=2)
    answer(ledger, *dispatched(ledger).values())
    ledger.begin()
    before = time.thread_time()
    assert len(ledger.leasable()) == 512
    assert time.thread_time() - before < 0.1  # 0.002; asked at each answer, with both threads waiting


@pytest.mark.parametrize("order", ["in_order", "as_completed"])
def test_spare_groups_that_are_answered_outlive_a_restart(order):
    limits = Limits(1, 0, last_step=2, max_attempts=1, spare=1, order=order)
    ledger = Ledger(limits, lambda event: None)
    answer(ledger, *dispatched(ledger).values())
    resumed = Ledger.from_json(ledger.to_json(), limits, lambda event: None)
    assert resumed.count(GroupState.READY) == 2
    with refused("trajectory-age", "max_trajectory_age_steps"):
        Ledger.from_json(ledger.to_json(), replace(limits, spare=0), lambda event: None)
