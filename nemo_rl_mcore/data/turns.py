"""The messages between a model and its environment, after each answer of an episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message


@dataclass(frozen=True)
class Turn:
    """An answer with its conversation, for the environment.

    messages: the conversation so far, with the answer last. finished: the answer ended by itself, not at its length
    limit. metadata: the environment's own of this episode, None after the first answer.
    """

    prompt: Prompt
    messages: tuple[Message, ...]
    finished: bool = True
    metadata: Any = None

    @property
    def answer(self) -> str:
        return self.messages[-1].content


def conversation(prompt: Prompt) -> tuple[Message, ...]:
    """Return the conversation before the first answer."""
    return prompt.context or (Message("user", prompt.text),)


def first_turn(prompt: Prompt, answer: str, *, finished: bool = True) -> Turn:
    return Turn(prompt, (*conversation(prompt), Message("assistant", answer)), finished)


@dataclass(frozen=True)
class Reply:
    """The environment's reply.

    reward: of this answer; an episode's is the sum. rewards: its parts by name, where there are several. terminated:
    the episode is over; else the model answers once more, after the observation. stop_strings: end that answer besides
    those of the recipe. metadata: given back with the next answer. answer: read from the text, if the environment does
    so. dropped: the reason why there is no reply after all retries; the other fields do not count then. unscored: the
    reward was None, and the episode ends without being learnt from. cut: characters left out of a long observation.
    """

    reward: float
    terminated: bool = True
    observation: tuple[Message, ...] = ()
    metadata: Any = None
    stop_strings: tuple[str, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    answer: str | None = None
    dropped: str | None = None
    unscored: bool = False
    cut: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return all but the metadata, as JSON, without empty fields."""
        given: dict[str, Any] = {
            "observation": [[message.role, message.content] for message in self.observation],
            "stop_strings": [*self.stop_strings],
            "rewards": dict(self.rewards),
        }
        given |= {name: getattr(self, name) for name in ("answer", "dropped", "unscored", "cut")}
        said = {name: value for name, value in given.items() if value}
        return {"reward": self.reward, "terminated": self.terminated, **said}


class Ending(IntEnum):
    """The end of an episode; all but the first are truncations, and the last two count in no mean and no group."""

    TERMINATED = 0
    """By the environment, after an answer that ended by itself."""
    ANSWER_LIMIT = 1
    """An answer was as long as answers may be."""
    TURN_LIMIT = 2
    """It had as many answers as episodes may have."""
    NO_ROOM = 3
    """The observation and one more answer would not have fitted into a sequence."""
    DROPPED = 4
    """The environment did not reply: nothing is learnt from the episode."""
    UNSCORED = 5
    """The environment gave no reward, which the recipe allows: nothing is learnt from the episode either."""
