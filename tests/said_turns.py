from collections.abc import Sequence
from typing import Any, NamedTuple

from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.environment.interface import Environment, replies_of
from nemo_rl_mcore.environment.turns import Reply, Turn


class Played(NamedTuple):
    """What was said to the answers of one episode, up to the end that the environment made."""

    replies: list[Reply]

    @property
    def observations(self) -> list[str]:
        return [reply.observation[0].content for reply in self.replies if not reply.terminated]

    @property
    def rewards(self) -> list[float]:
        return [reply.reward for reply in self.replies]

    @property
    def terminated(self) -> bool:
        return self.replies[-1].terminated


def play(environment: Environment, prompt: Prompt, answers: Sequence[str]) -> Played:
    """An answer ends by itself when it has a `$` behind it."""
    replies, metadata = list[Reply](), None
    for answer in answers:
        said = (Message("user", prompt.text), Message("assistant", answer.removesuffix("$")))
        turn = Turn(prompt, said, finished=answer.endswith("$"), metadata=metadata)
        (reply,) = replies_of(environment, [turn], {})
        replies.append(reply)
        metadata: Any = reply.metadata
    return Played(replies)
