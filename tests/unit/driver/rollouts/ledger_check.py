"""What is wrong with the state of a Ledger, looked up behind its back."""

from collections.abc import Iterator

from nemo_rl_mcore.driver.rollouts.ledger import GroupState, Ledger, StepState

LIVE = (GroupState.INFLIGHT, GroupState.READY, GroupState.LEASED)


def check(ledger: Ledger) -> None:
    """Fail, naming all that is wrong, when the state cannot be."""
    problems = [*_problems(ledger)]
    assert not problems, f"{'; '.join(problems)}"


def _problems(ledger: Ledger) -> Iterator[str]:
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
