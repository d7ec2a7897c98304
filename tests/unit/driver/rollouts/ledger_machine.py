"""Any order of events on a Ledger, beside a model of it: a machine that tests run on the Ledger and on its mutants.

The model is kept from the events alone, of which nothing is asked of the Ledger; `check` looks behind its back.
"""

import copy
import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import count, islice

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from nemo_rl_mcore.driver.rollouts import events
from nemo_rl_mcore.driver.rollouts.events import EVENT, Segment, Token
from nemo_rl_mcore.driver.rollouts.ledger import ORDERS, GroupState, Ledger, LedgerError, Limits, StepState

# How often what happens: left to itself, hypothesis hardly ever gets a step to its end.
WEIGHTS = {"advance": 12, "commit": 8, "overtake": 6, "dispatch": 6, "fail": 2, "requeue": 2, "leave_out": 1}
SELDOM = ["commit_what_cannot_be", "deliver_late", "deliver_what_was_never_asked", "give_the_step_up"]
SELDOM += ["call_out_of_turn", "lose_the_log", *("checkpoint", "resume") * 3]
EVENTS = st.sampled_from([name for name, weight in WEIGHTS.items() for _ in range(weight)] + SELDOM)
NUMBER = st.integers(0, 31)
# Calls, and the state of the step in which they are allowed.
IN_TURN = {
    "begin": StepState.IDLE,
    "lease": StepState.OPEN,
    "finishing": StepState.OPEN,
    "abort": StepState.OPEN,
    "finish": StepState.FINISHING,
    "lost": StepState.FINISHING,
    "publish": StepState.COMMITTED,
}
BETWEEN_STEPS = (StepState.IDLE, StepState.COMMITTED)


@dataclass
class LedgerModel:
    """valid, void: attempts, the former with the version published at their dispatch. oldest: version of a group.

    first: the version of the start. chunks: of the open step. steps: chunks of every finished one.
    """

    limits: Limits
    first: int
    valid: dict[Token, int] = field(default_factory=dict)
    void: list[Token] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)
    oldest: dict[int, int] = field(default_factory=dict)
    chunks: list[list[int]] = field(default_factory=list)
    steps: dict[int, list[list[int]]] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    phase: StepState = StepState.IDLE
    saved_at: int = 0

    def __post_init__(self):
        self.version = self.published = self.saved_at = self.first

    @property
    def leased(self):
        return {p for chunk in self.chunks for p in chunk}

    @property
    def trained(self):
        return [p for chunks in self.steps.values() for chunk in chunks for p in chunk]

    def may_dispatch(self):
        n = self.limits.groups_per_step
        live = len(self.valid) + len(self.ready) + len(self.leased)
        steps = min(self.limits.max_age + self.published + 1, self.limits.last_step)
        early = self.phase in (StepState.IDLE, StepState.OPEN) and self.version < self.limits.last_step
        spare = self.limits.spare if early else 0
        return live + self.version * n < steps * n + spare

    def next_to_dispatch(self):
        taken = {token.position for token in self.valid} | self.ready | self.leased
        return next(p for p in self.not_dropped() if p not in taken.union(self.trained))

    def next_to_train(self):
        """The groups that the open step takes before any other, without end."""
        done = self.leased.union(self.trained)
        return (p for p in self.not_dropped() if p not in done)

    def not_dropped(self):
        return (p for p in count(self.first * self.limits.groups_per_step) if p not in self.dropped)

    def commit(self, token, oldest):
        self.retire(token)
        self.ready.add(token.position)
        self.oldest[token.position] = oldest

    def fail(self, token, reason):
        """Whether the group is dropped."""
        self.retire(token)
        failures = self.failures[token.position] = self.failures.get(token.position, 0) + 1
        if failures < self.limits.max_attempts:
            return False
        self.dropped[token.position] = reason
        return True

    def leave_out(self, position, reason):
        self.ready.remove(position)
        self.dropped[position] = reason

    def retire(self, token):
        del self.valid[token]
        self.void.append(token)

    def lease(self, chunk):
        self.ready -= {*chunk}
        self.chunks.append(chunk)

    def finish(self):
        self.version += 1
        self.steps[self.version], self.chunks, self.phase = self.chunks, [], StepState.COMMITTED

    def give_up(self):
        self.ready |= self.leased
        self.chunks, self.phase = [], StepState.IDLE

    def to_redo(self):
        return [step for step in self.steps if step > self.saved_at]

    def copy(self):
        return copy.deepcopy(self)

    def resumed(self, void):
        """This model as that of a run which goes on from here; void: what was dispatched in vain since."""
        model = self.copy()
        model.valid, model.void, model.saved_at = {}, void, self.version
        model.published, model.phase = self.version, StepState.IDLE  # engines are given what was saved
        return model


LIVE = (GroupState.INFLIGHT, GroupState.READY, GroupState.LEASED)


def check(ledger):
    """Fail, naming all that is wrong, when the state cannot be."""
    problems = [*_problems(ledger)]
    assert not problems, f"{'; '.join(problems)}"


def _problems(ledger):
    groups, limits = ledger._groups, ledger.limits
    if ledger.trained + ledger.dropped.total() + len(groups) != ledger.cursor:
        yield "not every position before the cursor has one state"
    if [*groups] != sorted(groups) or (groups and [*groups][-1] >= ledger.cursor):
        yield "groups are out of order"
    if sorted(ledger._pending) != [p for p, g in groups.items() if g.state is GroupState.PENDING]:
        yield "the pending groups are not those that wait"
    if {*ledger._leased()} != {p for p, g in groups.items() if g.state is GroupState.LEASED}:
        yield "the leased groups are not those of the step"
    if ledger._chunks and ledger.step not in (StepState.OPEN, StepState.FINISHING):
        yield "groups are leased to no step"
    if ledger.live > (limits.max_age + 1) * limits.groups_per_step + limits.spare:
        yield f"{ledger.live} groups are live"
    if not all(ledger.dropped):
        yield "a dropped group has no reason"
    oldest = ledger.version - limits.max_age
    if old := [p for p, g in groups.items() if g.state in LIVE and g.min_version < oldest]:
        yield f"groups {old} are too old to be trained"


class LogLostError(Exception):
    """What the log raises when it cannot write."""


class LedgerMachine(RuleBasedStateMachine):
    """Each event is a method that is told two numbers: which of the attempts, and which of the ways."""

    ledger_class = Ledger
    orders = tuple(ORDERS)

    def __init__(self):
        super().__init__()
        self.log = []
        self.log_fails = self.started = self.sound = False
        self.before = None

    @initialize(
        n=st.integers(1, 4),
        max_age=st.integers(0, 3),
        steps=st.integers(3, 15),
        max_attempts=st.sampled_from([1, 2, 2, 3]),
        version=st.sampled_from([0, 0, 3]),
        order=st.integers(0, len(ORDERS) - 1),
        spare=st.sampled_from([0, 1, 3]),
    )
    def start(self, n, max_age, steps, max_attempts, version, order, spare):
        order = self.orders[order % len(self.orders)]
        spare = 0 if max_age else spare  # of synchronous runs alone
        self.limits = Limits(n, max_age, version + steps, max_attempts, order=order, spare=spare)
        self.in_order = order == "in_order"
        self.model = LedgerModel(self.limits, version)
        self.ledger = self.ledger_class(self.limits, self.take, version=version, incarnation=version)
        self.started = True
        self.saved = json.dumps(self.ledger.to_json()), self.model.copy()

    @rule(event=EVENTS, which=NUMBER, how=NUMBER)
    def happens(self, event, which, how):
        self.sound = False
        getattr(self, event)(which, how)

    def take(self, event):
        """The log: what it is told has not happened yet, and does not happen when it raises."""
        if self.started:
            assert self._seen() == self.before
        if self.log_fails:
            raise LogLostError
        assert EVENT.validate_json(EVENT.dump_json(event), strict=True) == event
        self.log.append(event)

    # Rollouts

    def dispatch(self, _which, how):
        for _ in range(how % 4 + 1):
            allowed = self.ledger.may_dispatch()
            assert allowed == self.model.may_dispatch()
            if not allowed:
                self._refused(self.ledger.dispatch)
                return
            assert self.ledger.next_position == self.model.next_to_dispatch()
            token = self._call(self.ledger.dispatch)
            assert token.position == self.model.next_to_dispatch()
            assert token not in self.model.void
            assert token not in self.model.valid
            self.model.valid[token] = self.model.published

    def commit(self, which, how):
        """Of one version or of several, and perhaps told twice."""
        if not self.model.valid:
            return
        token, start = self._under_way(which)
        newest = start + how // 4 % (self.model.version - start + 1)
        versions = [newest] if how % 2 else [*range(start, newest + 1)]
        segments = [Segment(3 * place, version) for place, version in enumerate(versions)]
        assert self._call(self.ledger.commit, token, segments) is True
        self.model.commit(token, min(versions))
        assert self.ledger._groups[token.position].min_version == min(versions)
        if how % 4 < 2:
            self._is_stale(token)

    def overtake(self, _which, how):
        """The newest of those under way is answered first: at random hardly any becomes old meanwhile."""
        self.commit(len(self.model.valid) - 1, how)

    def commit_what_cannot_be(self, which, how):
        if not self.model.valid:
            return
        token, start = self._under_way(which)
        impossible = [
            [Segment(0, start), Segment(2, start - 1)],
            [Segment(0, start), Segment(2, self.model.version + 1)],
            [],
            [Segment(1, start)],
            [Segment(0, start), Segment(2, start), Segment(1, start)],
        ]
        self._refused(self.ledger.commit, token, impossible[how % len(impossible)])

    def fail(self, which, _how):
        if not self.model.valid:
            return
        token, _ = self._under_way(which)
        assert self._call(self.ledger.fail, token, "slow") is True
        dropped = self.model.fail(token, "slow")
        assert self.log[-1] == events.Failed(token=token, reason="slow", dropped=dropped)

    def requeue(self, which, _how):
        if not self.model.valid:
            return
        token, _ = self._under_way(which)
        assert self._call(self.ledger.requeue, token, "engine lost") is True
        self.model.retire(token)

    def leave_out(self, which, _how):
        """A group that is answered, as dynamic sampling does."""
        self._refused(self.ledger.unused, self.ledger.cursor, "equal rewards")
        if self.model.ready:
            position = sorted(self.model.ready)[which % len(self.model.ready)]
            self._call(self.ledger.unused, position, "equal rewards")
            self.model.leave_out(position, "equal rewards")
            self._refused(self.ledger.unused, position, "equal rewards")

    def deliver_late(self, which, _how):
        """Of this life or one before; rather for groups that another attempt is under way for."""
        positions = {token.position for token in self.model.valid}
        late = [token for token in self.model.void if token.position in positions] or self.model.void
        if late:
            self._is_stale(late[which % len(late)])

    def deliver_what_was_never_asked(self, which, how):
        position = self._under_way(which)[0].position if self.model.valid else which
        self._is_stale(Token(self.ledger.incarnation + how % 2, position, 99))

    # The train step

    def advance(self, _which, how):
        """What the trainer does next; nothing when it waits for a group."""
        model, ledger = self.model, self.ledger
        if model.phase is StepState.COMMITTED:
            self._call(ledger.publish)
            model.published, model.phase = model.version, StepState.IDLE
        elif model.phase is StepState.FINISHING:
            self._call(ledger.finish)
            model.finish()
            chunks = tuple(map(tuple, model.steps[model.version]))
            assert self.log[-1] == events.Finished(step=model.version, chunks=chunks)
        elif model.phase is StepState.OPEN and len(model.leased) == self.limits.groups_per_step:
            assert all(model.version - model.oldest[p] <= self.limits.max_age for p in model.leased)
            self._put_spare_groups_away()
            self._call(ledger.finishing)
            model.phase = StepState.FINISHING
        elif model.phase is StepState.OPEN:
            self._lease(how % 4 + 1)
        elif model.version == self.limits.last_step:
            self._refused(ledger.begin)
        else:
            assert self._call(ledger.begin) == model.version + 1
            model.phase = StepState.OPEN

    def _put_spare_groups_away(self):
        """Those of a full step that the next one could not train, in a run that asks for some."""
        model, last = self.model, self.model.version - self.limits.max_age
        answered = [position for position in model.ready if model.oldest[position] <= last]
        asked = [token for token, start in model.valid.items() if start <= last]
        assert self.limits.spare or not answered + asked
        if answered + asked:
            self._refused(self.ledger.finishing)
        for position in answered:
            self._call(self.ledger.unused, position, "the step is full")
            model.leave_out(position, "the step is full")
        for token in asked:
            self._call(self.ledger.requeue, token, "the step is full")
            model.retire(token)

    def _lease(self, count):
        ledger, room = self.ledger, self.limits.groups_per_step - len(self.model.leased)
        assert ledger.room() == room
        if self.in_order:
            *own, beyond = islice(self.model.next_to_train(), room + 1)
            assert ledger.leasable() == [p for p in own if p in self.model.ready]
            self._refused(ledger.lease, [beyond])
        else:
            assert {*ledger.leasable()} <= self.model.ready
            assert len(ledger.leasable()) <= room
            if not self.model.valid:
                assert len(ledger.leasable()) == min(room, len(self.model.ready))
        self._refused(ledger.finishing)
        self._refused(ledger.lease, [])
        self._refused(ledger.lease, [p for p in self.model.ready if p not in ledger.leasable()][:1])
        chunk = ledger.leasable()[:count]
        if chunk:
            self._refused(ledger.lease, [*chunk, chunk[0]])
            self._call(ledger.lease, chunk)
            self.model.lease(chunk)

    def give_the_step_up(self, _which, _how):
        calls = {StepState.OPEN: self.ledger.abort, StepState.FINISHING: self.ledger.lost}
        if self.model.phase in calls:
            self._call(calls[self.model.phase], "rank 1 died")
            self.model.give_up()

    def call_out_of_turn(self, _which, _how):
        arguments = {"abort": ["why"], "lost": ["why"], "lease": [[*self.model.ready]]}
        for name, phase in IN_TURN.items():
            if phase is not self.model.phase:
                self._refused(getattr(self.ledger, name), *arguments.get(name, ()))
        if self.model.phase not in BETWEEN_STEPS:
            self._refused(self.ledger.to_json)
        self._refused(self.ledger.forget, self.model.version + 1)

    # Checkpoints, and the end of the driver

    def lose_the_log(self, _which, _how):
        if not self.ledger.may_dispatch():
            return
        self.log_fails, self.before = True, self._seen()
        try:
            self.ledger.dispatch()
        except LogLostError:
            assert self._seen() == self.before
        else:
            raise AssertionError("a group is dispatched that no log tells of")
        finally:
            self.log_fails = False

    def checkpoint(self, _which, _how):
        model = self.model
        if model.phase not in BETWEEN_STEPS:
            return
        self.saved = json.dumps(self.ledger.to_json()), model.copy()
        self._call(self.ledger.checkpointed, model.version)
        model.saved_at = model.version
        self._refused(self.ledger.chunks_of, model.version)
        self._refused(self.ledger.retained, model.version - 1)

    def resume(self, _which, how):
        """The driver dies, and another goes on from the checkpoint; attempts of the dead one may still be answered."""
        if how % 4:
            return
        text, model = self.saved
        lives, void = self.ledger.incarnation + 1, [*self.model.void, *self.model.valid]
        self.started = False
        self.ledger = self.ledger_class.from_json(json.loads(text), self.limits, self.take, incarnation=lives)
        self.started = True
        self.model = model.resumed(void)
        assert self.log[-1] == events.Started(incarnation=lives, version=model.version)

    # Invariants

    @invariant()
    def all_promises_are_kept(self):
        self.the_ledger_finds_nothing_wrong()
        self.it_stands_where_the_model_does()
        self.groups_are_trained_once_and_in_order()
        self.no_group_is_too_old_to_be_trained()
        self.with_nothing_under_way_something_can_happen()
        self.what_may_be_redone_is_kept()
        self.sound = True

    def the_ledger_finds_nothing_wrong(self):
        check(self.ledger)

    def it_stands_where_the_model_does(self):
        ledger, model = self.ledger, self.model
        assert (ledger.version, ledger.published, ledger.step) == (
            model.version,
            model.published,
            model.phase,
        )
        assert model.published <= model.version <= model.published + 1
        counts = {state: ledger.count(state) for state in GroupState if state is not GroupState.PENDING}
        assert counts == {
            GroupState.INFLIGHT: len(model.valid),
            GroupState.READY: len(model.ready),
            GroupState.LEASED: len(model.leased),
            GroupState.TRAINED: model.version * self.limits.groups_per_step,
            GroupState.DROPPED: len(model.dropped),
        }
        assert ledger.dropped == Counter(model.dropped.values())
        assert ledger.live <= (self.limits.max_age + 1) * self.limits.groups_per_step + self.limits.spare

    def groups_are_trained_once_and_in_order(self):
        trained = self.model.trained
        assert len({*trained}) == len(trained)
        assert self.model.dropped.keys().isdisjoint(trained)
        if self.in_order:
            assert sorted(trained) == [*islice(self.model.not_dropped(), len(trained))]

    def no_group_is_too_old_to_be_trained(self):
        model = self.model
        live = [*(model.oldest[position] for position in model.ready | model.leased), *model.valid.values()]
        assert all(model.version - oldest <= self.limits.max_age for oldest in live)

    def with_nothing_under_way_something_can_happen(self):
        if not self.model.valid and self.model.phase is StepState.OPEN and self.ledger.room():
            assert self.ledger.may_dispatch() or self.ledger.leasable()

    def what_may_be_redone_is_kept(self):
        model, redone = self.model, set[int]()
        for step in model.to_redo():
            assert self.ledger.chunks_of(step) == model.steps[step]
            redone.update(p for chunk in model.steps[step] for p in chunk)
        assert self.ledger.retained(model.saved_at) == redone | model.ready | model.leased

    def teardown(self):
        """Any run comes to its end when nothing fails any more."""
        if not self.sound:
            return
        for _ in range(20 * self.limits.last_step * self.limits.groups_per_step + 20):
            if self.model.version == self.limits.last_step and self.model.phase is StepState.IDLE:
                break
            self.dispatch(0, 3)
            while self.model.valid:
                self.commit(0, 3)
            self.advance(0, 3)
        assert (self.model.version, self.model.phase) == (self.limits.last_step, StepState.IDLE)
        self.groups_are_trained_once_and_in_order()

    # Calls

    def _under_way(self, which):
        return [*self.model.valid.items()][which % len(self.model.valid)]

    def _seen(self):
        ledger = self.ledger
        counts = map(ledger.count, GroupState)
        return (ledger.version, ledger.published, ledger.step, ledger.cursor, ledger.room(), *counts)

    def _call(self, call, *args):
        """A call that must be logged once, before it has an effect."""
        self.before, logged = self._seen(), len(self.log)
        result = call(*args)
        assert len(self.log) == logged + 1
        return result

    def _refused(self, call, *args):
        before, logged = self._seen(), len(self.log)
        try:
            call(*args)
        except LedgerError:
            assert (self._seen(), len(self.log)) == (before, logged)
        else:
            raise AssertionError(f"{call.__name__}{args} is allowed")

    def _is_stale(self, token):
        assert token not in self.model.valid
        before, logged = self._seen(), len(self.log)
        assert self.ledger.commit(token, [Segment(0, self.model.published)]) is False
        assert self.ledger.commit(token, [Segment(0, 0)]) is False
        assert self.ledger.fail(token, "late") is False
        assert self.ledger.requeue(token, "late") is False
        assert (self._seen(), len(self.log)) == (before, logged)


def run_machine(ledger_class, examples, steps, *, orders=tuple(ORDERS)):
    """Run the machine on a class; raises what the first example that fails raises."""

    def machine():
        made = LedgerMachine()
        made.ledger_class, made.orders = ledger_class, orders
        return made

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            report_multiple_bugs=False,
            print_blob=False,
        ),
    )
