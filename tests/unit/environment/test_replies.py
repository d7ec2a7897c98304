"""What an environment returns is held to its contract before it reaches an episode."""

import pytest
import torch

from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.turns import first_turn
from nemo_rl_mcore.environment.interface import EnvironmentReturn, replies_of
from nemo_rl_mcore.errors import RunStoppedError

TURN = first_turn(Prompt(3, "1>", "1"), "2")


class Saying:
    def __init__(self, **changes):
        self.changes = changes

    def step(self, message_log_batch, metadata):
        assert message_log_batch[0][-1] == {"role": "assistant", "content": "2", "finished": True}
        assert metadata[0]["answer"] == "1"
        said = {
            "observations": [{"role": "user", "content": "3>"}],
            "metadata": [None],
            "next_stop_strings": [["#"]],
            "rewards": torch.tensor([0.5]),
            "terminateds": torch.tensor([False]),
        }
        return EnvironmentReturn(**{**said, **self.changes})


def test_what_is_right_is_a_reply():
    [reply] = replies_of(Saying(answers=["2"]), [TURN], {})
    assert (reply.reward, reply.terminated, reply.stop_strings, reply.answer) == (0.5, False, ("#",), "2")
    assert [message.content for message in reply.observation] == ["3>"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observations": [{"role": "user", "content": None}]}, "an observation: None is not a string"),
        ({"observations": [{"role": 1, "content": "a"}]}, "an observation's role: 1 is not a string"),
        ({"observations": [{"role": "r" * 101, "content": "a"}]}, "role has 101 characters"),
        ({"observations": [{"role": "user", "content": "\ud83d"}]}, "surrogates not allowed"),
        ({"next_stop_strings": ["</call>"]}, "next_stop_strings: '</call>' is one text"),
        ({"next_stop_strings": [[""]]}, "an empty text would end every answer"),
        ({"answers": [torch.tensor(1)]}, "answers: tensor"),
        ({"terminateds": torch.tensor([True, False])}, "terminateds: 2 values for 1 answers"),
        ({"rewards": torch.tensor([float("nan")])}, "not finite"),
    ],
)
def test_what_is_wrong_is_told_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        replies_of(Saying(**changes), [TURN], {})


@pytest.mark.parametrize("name", ["a\n\x1b[2J/b", "\u202eevil", "a\tb", 3])
def test_a_reward_has_a_name_that_can_be_shown(name):
    with pytest.raises(RunStoppedError, match="printable") as stopped:
        replies_of(Saying(rewards={name: torch.tensor([1.0])}), [TURN], {})
    assert str(stopped.value).isprintable()


@pytest.mark.parametrize("name", ["length", "format/xml", "длина ответа"])
def test_other_names_pass(name):
    [reply] = replies_of(Saying(rewards={name: torch.tensor([1.0])}), [TURN], {})
    assert reply.rewards == {name: 1.0}


@pytest.mark.parametrize(
    ("content", "kept", "cut"), [("abc", "abc", 0), ("abcd", "abc", 1), ("a" * 10**6, "aaa", 10**6 - 3)]
)
def test_of_a_long_observation_the_beginning_is_shown_and_the_rest_is_counted(content, kept, cut):
    said = Saying(observations=[{"role": "user", "content": content}])
    [reply] = replies_of(said, [TURN], {}, 3)
    assert (reply.observation[0].content, reply.cut) == (kept, cut)
    recorded = reply.to_json()
    assert recorded.get("cut", 0) == cut
