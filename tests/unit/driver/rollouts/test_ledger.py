"""A ledger in any order of events, the mistakes in it that this would find, and what its state machine cannot name."""

import inspect
import json
import time
from dataclasses import replace

import ledger_machine
import pytest
from ledger_machine import check, run_machine
from refusals import refused

from nemo_rl_mcore.config.algorithm import AsyncRolloutsConfig
from nemo_rl_mcore.driver.rollouts import ledger as ledger_module
from nemo_rl_mcore.driver.rollouts.events import Segment
from nemo_rl_mcore.driver.rollouts.ledger import (
    ORDERS,
    AsCompleted,
    GroupState,
    InOrder,
    Ledger,
    LedgerError,
    Limits,
)


def test_any_order_of_events():
    run_machine(Ledger, examples=30, steps=100)


@pytest.mark.exhaustive
def test_any_long_order_of_events():
    run_machine(Ledger, examples=300, steps=200)


LOST, PUBLISHED = (
    "self._log(events.Lost(step=self.version + 1, reason=reason))",
    "self._log(events.Published(",
)
UNUSED = "self._log(events.Unused(position=position, reason=reason))"
PUBLISHES = f"{PUBLISHED}version=self.version, digest=digest))\n        self.step = StepState.IDLE"
FENCE = " if (self.incarnation, group.attempt) == (token.incarnation, token.attempt) else None"
MISTAKES = {
    "counts live groups alone": ("self.live + self.trained < self._admitted", "self.live <= self._admitted"),
    "admits by the unpublished version": ("limits.max_age + self.published", "limits.max_age + self.version"),
    "dispatches beyond the last step": (", limits.last_step)", ", limits.last_step + 1)"),
    "starts at the unpublished version": ("token.attempt, self.published", "token.attempt, self.version"),
    "takes instead of leasing": (
        "self._groups[position].state = GroupState.READY",
        "del self._groups[position]",
    ),
    "counts a lost step as done": (LOST, "return self.finish() or self.publish()"),
    "has no fence": (FENCE, ""),
    "takes answers twice": ("group.state is not GroupState.INFLIGHT", "group.state is GroupState.PENDING"),
    "resumes as the same incarnation": (", incarnation=incarnation)", ", incarnation=was.incarnation)"),
    "counts live without leased": (
        "- len(self._pending)",
        "- len(self._pending) - self.count(GroupState.LEASED)",
    ),
    "leaves a group out and keeps it": (UNUSED, f"return {UNUSED}"),
    "forgets spare groups": ("oldest = version - self.limits.max_age", "return []"),
    "believes the newest token": ("GroupState.READY, min(versions)", "GroupState.READY, versions[-1]"),
    "logs afterwards": (PUBLISHES, "\n        ".join(reversed(PUBLISHES.split("\n        ")))),
    "never drops": ("group.failures += 1", "pass"),
    "forgets a step too many": ("self._steps[self.version] = chunks", "self._steps = {self.version: chunks}"),
    "forgets ready groups in a save": ("min_version=group.min_version if", "min_version=None if"),
    "finishes a step that is not full": ("if self.room():", "if not self.limits:"),
}


def mistaken(made, old, new):
    """The class with another text in one place."""
    source, names = inspect.getsource(made), {**vars(ledger_module)}
    assert source.count(old) == 1, "the text of the ledger has changed"
    exec(source.replace(old, new), names)
    return names[made.__name__]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake, monkeypatch):
    """By the model alone, which is no copy of what the Ledger believes of itself."""
    monkeypatch.setattr(ledger_machine, "check", lambda ledger: None)
    with pytest.raises((AssertionError, LedgerError)):
        run_machine(mistaken(Ledger, *MISTAKES[mistake]), examples=300, steps=100)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("order", "old", "new"),
    [
        (AsCompleted, "return free", "return [room.groups] * (room.max_age + 1)"),
        (InOrder, "groups[: room.groups]", "groups[::-1][: room.groups]"),
    ],
    ids=["waits for nobody", "newest first"],
)
def test_a_mistake_in_an_order_breaks_the_bound(order, old, new, monkeypatch):
    monkeypatch.setattr(ledger_machine, "check", lambda ledger: None)
    monkeypatch.setattr(ledger_module, "ORDERS", {"as_completed": mistaken(order, old, new)()})
    with pytest.raises((AssertionError, LedgerError)):
        run_machine(Ledger, examples=300, steps=100, orders=("as_completed",))


def make(n=2, max_age=1, last_step=5, max_attempts=2, **limits):
    return Ledger(Limits(n, max_age, last_step, max_attempts, **limits), lambda event: None)


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


# Orders of consumption


def test_the_names_of_a_recipe_are_those_of_the_orders():
    assert AsyncRolloutsConfig.model_json_schema()["properties"]["order"]["enum"] == [*ORDERS]


def test_in_order_a_step_waits_for_the_first_group_and_as_completed_it_takes_the_others():
    for order, taken in (("in_order", []), ("as_completed", [1, 2])):
        ledger = make(order=order)
        tokens = [ledger.dispatch() for _ in range(4)]
        for token in tokens[1:3]:
            ledger.commit(token, [Segment(0, 0)])
        ledger.begin()
        assert ledger.leasable()[:2] == (taken or [1])
        assert ledger.room() == 2


@pytest.mark.parametrize("order", ORDERS)
def test_spare_groups_that_are_answered_outlive_a_restart(order):
    ledger = make(n=1, max_age=0, last_step=2, spare=1, order=order)
    fill(ledger)
    resumed = Ledger.from_json(ledger.to_json(), ledger.limits, lambda event: None)
    assert resumed.count(GroupState.READY) == 2
    with refused("trajectory-age", "max_trajectory_age_steps"):
        Ledger.from_json(ledger.to_json(), replace(ledger.limits, spare=0), lambda event: None)
