"""What a log says was trained, also after a resume, and which logs say what cannot be."""

import pytest
from refusals import refused

from nemo_rl_mcore.driver.rollouts import events
from nemo_rl_mcore.driver.rollouts.events import Segment, Timeline, Token
from nemo_rl_mcore.tools.replay import first_of_replay, require_kept, require_steps


def committed(position, *segments, incarnation=0, digest="d"):
    token = Token(incarnation, position, 1)
    return events.Committed(token=token, segments=tuple(Segment(*s) for s in segments), digest=digest)


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
    assert min(found.groups[2].versions) == 0
    require_steps(found, range(1, 3), "log")


def test_steps_that_a_resume_took_back_do_not_count():
    anew = [committed(2, (0, 1), incarnation=1, digest="other"), committed(3, (0, 1), incarnation=1)]
    found = Timeline.of([*LOG, events.Started(incarnation=1, version=1), *anew])
    assert [*found.chunks] == [1]
    assert found.weights == {1: "w1"}
    assert found.groups[2].digest == "other"


@pytest.mark.parametrize("steps", [range(1, 4), range(3, 5), range(2, 2)])
def test_steps_that_the_log_does_not_have_are_refused(steps):
    with refused("missing-steps", "--steps", "1 to 2"):
        require_steps(Timeline.of(LOG), steps, "log")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (trained(3, 9), "group 9"),
        ([committed(4, (0, 2), (1, 3)), *trained(3, 4)], "[2, 3]"),
    ],
)
def test_a_log_that_trains_what_was_not_there_is_refused(more, told):
    with refused("untimely-group", told):
        require_steps(Timeline.of([*LOG, *more]), range(1, 4), "log")


@pytest.mark.parametrize(
    ("kept", "gone", "remedy"),
    [
        ([2, 3], "1 to 1", "step 1"),
        ([3], "1 to 2", "step 2"),
        ([1, 2], "3 to 3", "grpo.async_grpo.enabled"),
        ([], "1 to 3", "grpo.async_grpo.enabled"),
    ],
)
def test_steps_whose_groups_are_gone_are_refused(tmp_path, kept, gone, remedy):
    for step in kept:
        (tmp_path / f"step_{step}").mkdir()
    with refused("groups-gone", "--steps 0:3", gone, remedy):
        require_kept(tmp_path, range(1, 4), "grpo.async_grpo")
    require_kept(tmp_path, range(min(kept, default=1), max(kept, default=0) + 1), "grpo.async_grpo")


@pytest.mark.parametrize(
    ("starts", "kept", "begin"),
    [
        ([0, 2, 4], [3, 4, 5, 6], 2),
        ([0, 3], [3, 4, 5, 6], 3),
        ([0, 4], [1, 2, 3, 4, 5, 6], 0),
        ([0, 1, 2], [3, 4, 5, 6], 2),
    ],
)
def test_a_replay_begins_at_the_last_start_from_which_groups_are_kept(tmp_path, starts, kept, begin):
    for step in kept:
        (tmp_path / f"step_{step}").mkdir()
    assert first_of_replay(starts, range(4, 6), tmp_path) == begin + 1


def test_steps_that_no_kept_start_leads_to_are_refused_with_those_that_can_be_replayed(tmp_path):
    for step in (1, 2, 4, 5, 6, 7):
        (tmp_path / f"step_{step}").mkdir()
    with refused("no-start", "--steps 3:5", "0:2", "6:7"):
        first_of_replay([6, 0], range(4, 6), tmp_path)
