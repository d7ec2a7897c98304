"""What a log says was trained, also after a resume, and which logs say what cannot be."""

import pytest
import torch
from refusals import refused

from nemo_rl_mcore.controllers import events
from nemo_rl_mcore.controllers.events import LoggedTurn, Segment, Token
from nemo_rl_mcore.controllers.group_store import GroupStore
from nemo_rl_mcore.controllers.logged_turns import turns_of
from nemo_rl_mcore.controllers.replayed_rollouts import missing_groups, require_steps
from nemo_rl_mcore.controllers.timeline import Timeline
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.errors import RunStoppedError


def committed(position, *segments, incarnation=0, digest="d", turns=()):
    token = Token(incarnation, position, 1)
    drawn = [tuple(Segment(*s) for s in each) for each in (segments, *turns)]
    logged = tuple(LoggedTurn(each, ()) for each in drawn[1:])
    return events.Committed(token=token, segments=drawn[0], digest=digest, turns=logged)


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
    assert found.groups[2].oldest == 0
    require_steps(found, range(1, 3), GroupStore(), "log")


def test_steps_that_a_resume_took_back_do_not_count():
    anew = [committed(2, (0, 1), incarnation=1, digest="other"), committed(3, (0, 1), incarnation=1)]
    found = Timeline.of([*LOG, events.Started(incarnation=1, version=1), *anew])
    assert [*found.chunks] == [1]
    assert found.weights == {1: "w1"}
    assert found.groups[2].digest == "other"


@pytest.mark.parametrize("steps", [range(1, 4), range(3, 5), range(2, 2)])
def test_steps_that_the_log_does_not_have_are_refused(steps):
    with refused("missing-steps", "--steps", "1 to 2"):
        require_steps(Timeline.of(LOG), steps, GroupStore(), "log")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (trained(3, 9), "step 3 trains group 9, which was never drawn before it"),
        ([committed(4, (0, 2), (1, 3)), *trained(3, 4)], r"group 4, which was drawn by \[2, 3\] before it"),
        (
            [committed(4, (0, 2), turns=[[(0, 2)], [(0, 1)]]), *trained(3, 4)],
            r"group 4, which was drawn by \[2, 1\]",
        ),
        (
            [committed(4, (0, 2), turns=[[(0, 2), (1, 3)]]), *trained(3, 4)],
            r"group 4, which was drawn by \[2, 3\]",
        ),
    ],
)
def test_a_log_that_trains_what_was_not_there_is_refused(more, message):
    with pytest.raises(RunStoppedError, match=message):
        require_steps(Timeline.of([*LOG, *more]), range(1, 4), GroupStore(), "log")


def test_groups_that_weights_of_before_have_begun_cannot_be_drawn_again():
    assert missing_groups(Timeline.of(LOG), range(2, 3), GroupStore()) == [2]
    assert missing_groups(Timeline.of(LOG), range(1, 3), GroupStore()) == []
    turns_begun_before = committed(3, (0, 1), turns=[[(0, 0), (1, 1)]])
    assert missing_groups(Timeline.of([*LOG, turns_begun_before]), range(2, 3), GroupStore()) == [2, 3]


def test_a_turn_has_a_step_for_each_batch_of_rows_that_run_together():
    # Row 0 answers twice; the others run with 3 and with 5 tokens at hand, one batch after the other.
    numbers = torch.tensor([[0, 1, 0, 2, 2, 0], [0, 1, 1, 1, 0, 2], [0, 1, 0, 2, 0, 0], [0, 1, 1, 0, 0, 0]])
    versions = torch.tensor(
        [[-1, 3, -1, 4, 5, -1], [-1, 3, 3, 4, -1, 5], [-1, 3, -1, 4, -1, -1], [-1, 3, 3, -1, -1, -1]]
    )
    replies = [[{"reward": 0.0}] * int(row.max()) for row in numbers]
    group = BatchedDataDict(
        turn_of_token=numbers, token_mask=(numbers > 0).float(), weight_versions=versions, replies=replies
    )
    first, second = turns_of(group)
    assert [(one.first, one.version) for one in first.segments] == [(0, 3), (2, 4)]
    assert [(one.first, one.version) for one in second.segments] == [(0, 4), (1, 5)]
    assert [len(turn.replies) for turn in (first, second)] == [4, 3]
    # The other way round: what was drawn first of the longer batch comes after all of the shorter one.
    versions[1, 5] = 6
    versions[0, 4] = 4
    _, second = turns_of(group)
    assert [(one.first, one.version) for one in second.segments] == [(0, 4), (2, 6)]
