"""Any order of events on a Ledger, against a model of its own: a machine that a test runs on the Ledger and on mutants.

The model holds what the Ledger must not be asked for: which attempts are valid, which groups have been trained by which
step, and which versions their tokens have.
"""

import json

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from nemo_rl_mcore.controllers import events
from nemo_rl_mcore.controllers.events import Segment, Token, from_line, to_line
from nemo_rl_mcore.controllers.ledger import Ledger
from nemo_rl_mcore.controllers.states import GroupState, LedgerError, Limits, StepState

WEIGHTS = {
    "dispatch": 6,
    "commit": 8,
    "commit_what_cannot_be": 1,
    "fail": 1,
    "cancel": 1,
    "deliver_late": 1,
    "deliver_what_was_never_asked": 1,
    "advance": 12,
    "give_the_step_up": 1,
    "call_out_of_turn": 1,
    "lose_the_log": 1,
    "checkpoint": 1,
    "resume": 1,
}
"""How often what happens: left to itself, hypothesis hardly ever gets a step to its end."""
EVENTS = st.sampled_from([name for name, weight in WEIGHTS.items() for _ in range(weight)])
NUMBER = st.integers(0, 31)


class RefusedError(Exception):
    """What the log raises when it cannot write."""


class LedgerMachine(RuleBasedStateMachine):
    """Model: `valid` and `void` attempts, positions `ready` and in `chunks`, `oldest` version of a group."""

    ledger_class = Ledger

    def __init__(self):
        super().__init__()
        self.log = []
        self.log_fails = False
        self.valid = {}  # token: the version published at its dispatch
        self.void = []
        self.ready, self.oldest = set(), {}
        self.chunks, self.steps = [], {}  # of the open step; by step
        self.dropped, self.failures = {}, {}
        self.saved_at = self.version = self.published = 0
        self.phase = StepState.IDLE
        self.saved = None

    @initialize(
        n=st.integers(1, 4),
        max_age=st.integers(0, 3),
        steps=st.integers(3, 15),
        max_attempts=st.sampled_from([1, 2, 1000]),
        version=st.sampled_from([0, 0, 3]),
    )
    def start(self, n, max_age, steps, max_attempts, version):
        self.limits = Limits(n, max_age, version + steps, max_attempts)
        self.first = self.version = self.published = self.saved_at = version
        self.ledger = self.ledger_class(self.limits, self.take, version=version, incarnation=version)
        self.started = 1
        self._save()

    def take(self, event):
        """The log: what it is told has not happened yet, and does not happen when it raises."""
        if hasattr(self, "started"):
            assert self._seen() == self.before
        if self.log_fails:
            raise RefusedError
        assert from_line(to_line(event)) == event
        self.log.append(event)

    def _seen(self):
        ledger = self.ledger
        return (
            ledger.version,
            ledger.published,
            ledger.step,
            ledger.cursor,
            ledger.room(),
            *map(ledger.count, GroupState),
        )

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

    @rule(event=EVENTS, pick=NUMBER, how=NUMBER)
    def happens(self, event, pick, how):
        """pick: of the attempts, or groups; how: of the ways."""
        getattr(self, event)(pick, how)

    # Rollouts

    def dispatch(self, _pick, how):
        for _ in range(how % 4 + 1):
            live = len(self.valid) + len(self.ready) + len(self._leased())
            trained = self.version * self.limits.groups_per_step
            steps = min(self.limits.max_age + self.published + 1, self.limits.last_step)
            allowed = live + trained < steps * self.limits.groups_per_step
            assert self.ledger.may_dispatch() == allowed
            if not allowed:
                self._refused(self.ledger.dispatch)
                return
            token = self._call(self.ledger.dispatch)
            expected = next(p for p in range(10**6) if not self._is_taken(p))
            assert token.position == expected
            assert token not in self.void
            assert token not in self.valid
            self.valid[token] = self.published

    def _is_taken(self, position):
        under_way = {token.position for token in self.valid}
        return position < self.first * self.limits.groups_per_step or position in (
            under_way | self.ready | self._leased() | self._trained() | self.dropped.keys()
        )

    def commit(self, pick, how):
        """Of one version or of several, and perhaps told twice."""
        if not self.valid:
            return
        token = self._pick(self.valid, pick)
        start = self.valid[token]
        newest = start + how // 4 % (self.version - start + 1)
        versions = [newest] if how % 2 else [*range(start, newest + 1)]
        segments = [Segment(3 * place, version) for place, version in enumerate(versions)]
        assert self._call(self.ledger.commit, token, segments) is True
        self._retire(token)
        self.ready.add(token.position)
        self.oldest[token.position] = min(versions)
        assert self.ledger.min_version(token.position) == min(versions)
        if how % 4 < 2:
            self._is_stale(token)

    def commit_what_cannot_be(self, pick, how):
        if not self.valid:
            return
        token = self._pick(self.valid, pick)
        start = self.valid[token]
        impossible = [
            [Segment(0, start), Segment(2, start - 1)],
            [Segment(0, start), Segment(2, self.version + 1)],
            [],
            [Segment(1, start)],
            [Segment(0, start), Segment(2, start), Segment(1, start)],
        ]
        self._refused(self.ledger.commit, token, impossible[how % len(impossible)])

    def fail(self, pick, _how):
        if not self.valid:
            return
        token = self._pick(self.valid, pick)
        assert self._call(self.ledger.fail, token, "slow") is True
        self._retire(token)
        failures = self.failures[token.position] = self.failures.get(token.position, 0) + 1
        dropped = failures >= self.limits.max_attempts
        assert self.log[-1] == events.Failed(token=token, reason="slow", dropped=dropped)
        if dropped:
            self.dropped[token.position] = "slow"

    def cancel(self, pick, _how):
        if not self.valid:
            return
        token = self._pick(self.valid, pick)
        assert self._call(self.ledger.cancel, token, "engine lost") is True
        self._retire(token)

    def deliver_late(self, pick, _how):
        """Of this life or one before; rather of the newest attempts."""
        if self.void:
            self._is_stale(self._pick(self.void, -1 - pick))

    def deliver_what_was_never_asked(self, pick, how):
        position = self._pick(self.valid, pick).position if self.valid else pick
        self._is_stale(Token(self.ledger.incarnation + how % 2, position, 99))

    def _is_stale(self, token):
        if token in self.valid:
            return
        before, logged = self._seen(), len(self.log)
        assert self.ledger.commit(token, [Segment(0, self.published)]) is False
        assert self.ledger.commit(token, [Segment(0, 0)]) is False
        assert self.ledger.fail(token, "late") is False
        assert self.ledger.cancel(token, "late") is False
        assert (self._seen(), len(self.log)) == (before, logged)

    # The train step

    def advance(self, _pick, how):
        """What the trainer does next; nothing when it waits for a group."""
        ledger, n = self.ledger, self.limits.groups_per_step
        if self.phase is StepState.IDLE:
            self._begin()
        elif self.phase is StepState.COMMITTED:
            self._call(ledger.publish)
            self.published, self.phase = self.version, StepState.IDLE
        elif self.phase is StepState.FINISHING:
            digest = f"digest {self.version + 1}"
            self._call(ledger.finish, digest)
            self.version += 1
            chunks = tuple(map(tuple, self.chunks))
            assert self.log[-1] == events.Finished(step=self.version, chunks=chunks, digest=digest)
            self.steps[self.version], self.chunks, self.phase = self.chunks, [], StepState.COMMITTED
        elif len(self._leased()) == n:
            assert all(self.version - self.oldest[p] <= self.limits.max_age for p in self._leased())
            self._call(ledger.finishing)
            self.phase = StepState.FINISHING
        else:
            self._lease(how % 4 + 1)

    def _begin(self):
        if self.version == self.limits.last_step:
            self._refused(self.ledger.begin)
            return
        assert self._call(self.ledger.begin) == self.version + 1
        self.phase = StepState.OPEN

    def _lease(self, count):
        ledger, room = self.ledger, self.limits.groups_per_step - len(self._leased())
        assert ledger.room() == room
        unleased = (p for p in range(10**6) if not self._is_done(p) and p not in self._leased())
        own = [next(unleased) for _ in range(room)]
        assert ledger.leasable() == [p for p in own if p in self.ready]
        self._refused(ledger.finishing)
        self._refused(ledger.lease, [])
        self._refused(ledger.lease, [next(unleased)])
        chunk = ledger.leasable()[:count]
        if not chunk:
            return
        self._refused(ledger.lease, [*chunk, chunk[0]])
        self._call(ledger.lease, chunk)
        self.ready -= {*chunk}
        self.chunks.append(chunk)

    def _is_done(self, position):
        return (
            position < self.first * self.limits.groups_per_step
            or position in self._trained()
            or position in self.dropped
        )

    def give_the_step_up(self, _pick, _how):
        if self.phase not in (StepState.OPEN, StepState.FINISHING):
            return
        call = self.ledger.abort if self.phase is StepState.OPEN else self.ledger.lost
        self._call(call, "rank died")
        self.ready |= self._leased()
        self.chunks, self.phase = [], StepState.IDLE

    def call_out_of_turn(self, _pick, _how):
        ledger = self.ledger
        allowed = {
            StepState.IDLE: {"begin"},
            StepState.OPEN: {"abort", "finishing", "lease"},
            StepState.FINISHING: {"finish", "lost"},
            StepState.COMMITTED: {"publish"},
        }[self.phase]
        calls = {
            "begin": (ledger.begin,),
            "abort": (ledger.abort, "no reason"),
            "finishing": (ledger.finishing,),
            "finish": (ledger.finish,),
            "lost": (ledger.lost, "no reason"),
            "publish": (ledger.publish,),
            "lease": (ledger.lease, [*self.ready]),
        }
        for name in calls.keys() - allowed:
            self._refused(*calls[name])
        self._refused(ledger.forget, self.version + 1)
        if self.phase is not StepState.IDLE:
            self._refused(ledger.to_json)

    def lose_the_log(self, _pick, _how):
        if not self.ledger.may_dispatch():
            return
        self.log_fails = True
        before = self._seen()
        try:
            self._call(self.ledger.dispatch)
        except RefusedError:
            pass
        else:
            raise AssertionError("a group is dispatched that no log tells of")
        finally:
            self.log_fails = False
        assert self._seen() == before

    # Checkpoints, and the end of the driver

    def checkpoint(self, _pick, _how):
        if self.phase is not StepState.IDLE:
            return
        self._save()
        self._call(self.ledger.checkpointed, self.version)
        self.saved_at = self.version
        if self.version:
            self._refused(self.ledger.chunks_of, self.version)
        if self.version > self.first:
            self._refused(self.ledger.retained, self.version - 1)

    def _save(self):
        model = {
            "ready": {*self.ready},
            "oldest": {**self.oldest},
            "steps": {**self.steps},
            "dropped": {**self.dropped},
            "failures": {**self.failures},
        }
        self.saved = json.dumps(self.ledger.to_json()), self.version, model

    def resume(self, _pick, how):
        """The driver dies, and another goes on from the checkpoint; attempts of the dead one may still be answered."""
        if how % 4:
            return
        self.void += self.valid
        text, self.version, model = self.saved
        del self.started
        lives = self.ledger.incarnation + 1
        saved = json.loads(text)
        self.ledger = self.ledger_class.from_json(saved, self.limits, self.take, incarnation=lives)
        self.started = 1
        self.valid, self.chunks, self.phase, self.published = {}, [], StepState.IDLE, self.version
        self.ready, self.oldest = {*model["ready"]}, {**model["oldest"]}
        self.steps, self.dropped, self.failures = (
            {**model["steps"]},
            {**model["dropped"]},
            {**model["failures"]},
        )
        self.saved_at = self.version
        assert self.log[-1] == events.Started(incarnation=lives, version=self.version)

    # Invariants

    @invariant()
    def the_ledger_finds_nothing_wrong(self):
        self.ledger.check()

    @invariant()
    def it_stands_where_the_model_does(self):
        ledger, leased = self.ledger, self._leased()
        assert (ledger.version, ledger.published, ledger.step) == (self.version, self.published, self.phase)
        assert self.published <= self.version <= self.published + 1
        assert ledger.count(GroupState.INFLIGHT) == len(self.valid)
        assert ledger.count(GroupState.READY) == len(self.ready)
        assert ledger.count(GroupState.LEASED) == len(leased)
        assert ledger.count(GroupState.TRAINED) == self.version * self.limits.groups_per_step
        assert ledger.dropped == self.dropped
        assert ledger.live <= (self.limits.max_age + 1) * self.limits.groups_per_step

    @invariant()
    def groups_are_trained_once_and_in_order(self):
        trained = [p for chunks in self.steps.values() for chunk in chunks for p in chunk]
        assert len(trained) == len({*trained})
        start = self.first * self.limits.groups_per_step
        undropped = (p for p in range(start, 10**6) if p not in self.dropped)
        assert sorted(trained) == [next(undropped) for _ in trained]

    @invariant()
    def no_group_is_too_old_to_be_trained(self):
        for position in self.ready | self._leased():
            assert self.version - self.oldest[position] <= self.limits.max_age
        for start in self.valid.values():
            assert self.version - start <= self.limits.max_age

    @invariant()
    def with_nothing_under_way_something_can_happen(self):
        if not self.valid and self.phase is StepState.OPEN and self.ledger.room():
            assert self.ledger.may_dispatch() or self.ledger.leasable()

    @invariant()
    def what_may_be_redone_is_kept(self):
        recent = [step for step in self.steps if step > self.saved_at]
        for step in recent:
            assert self.ledger.chunks_of(step) == self.steps[step]
        redone = {p for step in recent for chunk in self.steps[step] for p in chunk}
        assert self.ledger.retained(self.saved_at) == redone | self.ready | self._leased()

    def teardown(self):
        """Any run comes to its end when nothing fails any more."""
        if not hasattr(self, "started"):
            return
        for _ in range(20 * self.limits.last_step * self.limits.groups_per_step + 20):
            if self.version == self.limits.last_step and self.phase is StepState.IDLE:
                break
            self.dispatch(0, 3)
            while self.valid:
                self.commit(0, 3)
            self.advance(0, 3)
        assert (self.version, self.phase) == (self.limits.last_step, StepState.IDLE)
        self.groups_are_trained_once_and_in_order()

    def _leased(self):
        return {p for chunk in self.chunks for p in chunk}

    def _trained(self):
        return {p for chunks in self.steps.values() for chunk in chunks for p in chunk}

    def _pick(self, some, pick):
        return [*some][pick % len(some)]

    def _retire(self, token):
        del self.valid[token]
        self.void.append(token)


def run_machine(ledger_class, examples, steps):
    """Run the machine on a class; raises what the first example that fails raises."""

    def machine():
        made = LedgerMachine()
        made.ledger_class = ledger_class
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
