"""The ledger keeps its promises in any order of events, and no mistake in it would go unseen."""

import ledger_machine
import pytest
from ledger_machine import run_machine

from nemo_rl_mcore.driver.rollouts import ledger as ledger_module
from nemo_rl_mcore.driver.rollouts.ledger import (
    AsCompleted,
    GroupState,
    InOrder,
    Ledger,
    LedgerError,
    StepState,
)


def test_any_order_of_events():
    run_machine(Ledger, examples=30, steps=100)


@pytest.mark.exhaustive
def test_any_long_order_of_events():
    run_machine(Ledger, examples=300, steps=200)


class CountsLiveAlone(Ledger):
    """n * (max_age + 1) live groups and one more, whatever the version."""

    def may_dispatch(self):
        room = (self.limits.max_age + 1) * self.limits.groups_per_step + 1
        left = self.limits.last_step * self.limits.groups_per_step - self.trained
        return self.live < min(room, left)


class AdmitsByUnpublishedVersion(Ledger):
    def may_dispatch(self):
        steps = min(self.limits.max_age + self.version + 1, self.limits.last_step)
        return self.live + self.trained < steps * self.limits.groups_per_step


class DispatchesBeyondTheLastStep(Ledger):
    def may_dispatch(self):
        steps = self.limits.max_age + self.published + 1
        return self.live + self.trained < steps * self.limits.groups_per_step


class StartsAtUnpublishedVersion(Ledger):
    def dispatch(self):
        token = super().dispatch()
        self._groups[token.position].min_version = self.version
        return token


class TakesInsteadOfLeasing(Ledger):
    """What a step has taken is gone with it."""

    def _return_leases(self):
        for position in self._leased():
            del self._groups[position]
        self._chunks = []
        self.step = StepState.IDLE


class CountsALostStepAsDone(Ledger):
    def lost(self, reason):
        self.finish()
        self.publish()


class HasNoFence(Ledger):
    def _under_way(self, token):
        group = self._groups.get(token.position)
        return group if group is not None and group.state is GroupState.INFLIGHT else None


class TakesAnswersTwice(Ledger):
    def _under_way(self, token):
        group = self._groups.get(token.position)
        if group is None or group.state not in (GroupState.INFLIGHT, GroupState.READY):
            return None
        return group if (self.incarnation, group.attempt) == (token.incarnation, token.attempt) else None


class ResumesAsTheSameIncarnation(Ledger):
    @classmethod
    def from_json(cls, saved, limits, log, *, incarnation=None):
        ledger = super().from_json(saved, limits, log, incarnation=incarnation)
        ledger.incarnation = saved["incarnation"]
        return ledger


class CountsLiveWithoutLeased(Ledger):
    @property
    def live(self):
        return super().live - self.count(GroupState.LEASED)


class LeavesAGroupOutAndKeepsIt(Ledger):
    """It is told, and trained all the same."""

    def unused(self, position, reason):
        groups = dict(self._groups)
        super().unused(position, reason)
        self._groups = groups
        self.dropped[reason] -= 1


class ForgetsSpareGroups(Ledger):
    """A step ends while groups are left that no step can train."""

    def _too_old_at(self, version, *states):
        return []


class BelievesTheNewestToken(Ledger):
    """The version of a group is that of its last token."""

    def commit(self, token, segments):
        taken = super().commit(token, segments)
        if taken:
            self._groups[token.position].min_version = segments[-1].version
        return taken


class LogsAfterwards(Ledger):
    def publish(self):
        log, told = self._log, []
        self._log = told.append
        super().publish()
        self._log = log
        for event in told:
            log(event)


class NeverDrops(Ledger):
    def fail(self, token, reason):
        group = self._under_way(token)
        if group is not None:
            group.failures = -1
        return super().fail(token, reason)


class ForgetsAStepTooMany(Ledger):
    def finish(self):
        super().finish()
        self._steps.pop(self.version - 1, None)


class ForgetsReadyGroupsInASave(Ledger):
    def to_json(self):
        saved = super().to_json()
        saved["groups"] = [{**group, "min_version": None} for group in saved["groups"]]
        return saved


class FinishesAStepThatIsNotFull(Ledger):
    def finishing(self):
        room = self.room
        self.room = lambda: 0
        try:
            super().finishing()
        finally:
            self.room = room


MISTAKES = [
    CountsLiveAlone,
    AdmitsByUnpublishedVersion,
    DispatchesBeyondTheLastStep,
    StartsAtUnpublishedVersion,
    TakesInsteadOfLeasing,
    CountsALostStepAsDone,
    HasNoFence,
    TakesAnswersTwice,
    ResumesAsTheSameIncarnation,
    CountsLiveWithoutLeased,
    LeavesAGroupOutAndKeepsIt,
    ForgetsSpareGroups,
    BelievesTheNewestToken,
    LogsAfterwards,
    NeverDrops,
    ForgetsAStepTooMany,
    ForgetsReadyGroupsInASave,
    FinishesAStepThatIsNotFull,
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_found(mistake, monkeypatch):
    """By the model alone, which is no copy of what the Ledger believes of itself."""
    monkeypatch.setattr(ledger_machine, "check", lambda ledger: None)
    with pytest.raises((AssertionError, LedgerError)):
        run_machine(mistake, examples=300, steps=100)


class WaitsForNobody(AsCompleted):
    """Whoever is ready is trained, also where a group at the largest age is not answered yet."""

    def _free_places(self, groups, room):
        return [room.groups] * (room.max_age + 1)


class NewestFirst(InOrder):
    def taken(self, groups, room):
        return super().taken(groups[::-1], room)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", [WaitsForNobody, NewestFirst], ids=lambda one: one.__name__)
def test_a_mistake_in_an_order_breaks_the_bound(mistake, monkeypatch):
    monkeypatch.setattr(ledger_machine, "check", lambda ledger: None)
    monkeypatch.setattr(ledger_module, "ORDERS", {"as_completed": mistake()})
    with pytest.raises((AssertionError, LedgerError)):
        run_machine(Ledger, examples=300, steps=100, orders=("as_completed",))
