"""What is said between a model and its environment, after each answer of an episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message


@dataclass(frozen=True)
class Turn:
    """What an environment is shown.

    messages: the conversation so far, with the answer last. finished: whether that ended by itself, not at its length
    limit. metadata: what the environment said of this episode after the answer before, None after the first.
    """

    prompt: Prompt
    messages: tuple[Message, ...]
    finished: bool = True
    metadata: Any = None

    @property
    def answer(self) -> str:
        return self.messages[-1].content


def conversation(prompt: Prompt) -> tuple[Message, ...]:
    """Return what the model is shown before its first answer."""
    return prompt.context or (Message("user", prompt.text),)


def first_turn(prompt: Prompt, answer: str, *, finished: bool = True) -> Turn:
    return Turn(prompt, (*conversation(prompt), Message("assistant", answer)), finished)


@dataclass(frozen=True)
class Reply:
    """What the environment says to it.

    reward: of this answer; an episode's is the sum. rewards: its parts by name, where there are several. terminated:
    the episode is over; else the model answers once more, after the observation. stop_strings: end that answer besides
    those of the recipe. metadata: given back with the next answer. answer: what was read of the text, if anything.
    dropped: why there is no reply, although it was asked for as often as allowed; nothing else of it counts then.
    unscored: the reward was None, with which the episode ends; it has no part in what is learnt.
    cut: characters of the observation that were left out, as it was longer than the model is shown.
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
        """Return all but the metadata, as JSON; what says nothing is left out."""
        given: dict[str, Any] = {
            "observation": [[message.role, message.content] for message in self.observation],
            "stop_strings": [*self.stop_strings],
            "rewards": dict(self.rewards),
        }
        given |= {name: getattr(self, name) for name in ("answer", "dropped", "unscored", "cut")}
        said = {name: value for name, value in given.items() if value}
        return {"reward": self.reward, "terminated": self.terminated, **said}


class Ending(IntEnum):
    """How an episode ended; all but the first are truncations, and the last two count in no mean and no group."""

    TERMINATED = 0
    """The environment said so, and the last answer ended by itself."""
    ANSWER_LIMIT = 1
    """An answer was as long as answers may be."""
    TURN_LIMIT = 2
    """It had as many answers as episodes may have."""
    NO_ROOM = 3
    """The observation and one more answer would not have fitted into a sequence."""
    DROPPED = 4
    """The environment did not reply: nothing is known of it, and nothing is learnt from it."""
    UNSCORED = 5
    """The environment gave no reward, and the recipe bears that: nothing is learnt from it either."""
