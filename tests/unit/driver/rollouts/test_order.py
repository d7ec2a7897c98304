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


def a_ledger(order, *, n=1, max_age):
    limits = Limits(n, max_age, last_step=20, max_attempts=1, order=order)
    return Ledger(limits, lambda event: None)


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
