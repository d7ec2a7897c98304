import pytest

from nemo_rl_mcore.driver.observability.sinks import EqualRewardsSink


@pytest.mark.parametrize(
    ("spreads", "told_of"),
    [
        ([0.0] * 9, [9]),
        ([0.0] * 10, [10]),
        ([0.0] * 25, [10]),
        ([0.5] + [0.0] * 9, []),
        ([0.5] + [0.0] * 10 + [0.5] + [0.0] * 10, [10, 10]),
        ([0.5] * 12, []),
        ([], []),
    ],
)
def test_steps_that_teach_nothing_are_told_of(spreads, told_of):
    lines = []
    sink = EqualRewardsSink(lines.append)
    for step, spread in enumerate(spreads, start=1):
        sink.log(step, {"train/reward_min": 0.25, "train/reward_max": 0.25 + spread})
    sink.close()
    sink.close()
    assert [int(line.split("last ")[1].split()[0]) for line in lines] == told_of
    assert all("the reward 0.25" in line for line in lines)


def test_a_run_without_answers_is_none_of_its_concern():
    lines = []
    sink = EqualRewardsSink(lines.append)
    sink.log(1, {"train/loss": 1.0})
    sink.close()
    assert lines == []
