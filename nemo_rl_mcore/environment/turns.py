"""Messages between a model and its environment after each answer in an episode."""

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

    messages: the conversation so far, the answer last. finished: the answer ended before its length limit.
    metadata: the environment's own data about this episode, None after the first answer.
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

    reward: for this answer; an episode's reward is the sum. rewards: its parts by name, if there are several.
    terminated: the episode is over; else the model answers again, after the observation. stop_strings: end that answer,
    in addition to the recipe's. metadata: returned with the next answer. answer: extracted from the text, if the
    environment does so. dropped: the reason for no reply after all retries; other fields then do not count. unscored:
    the reward was None, and the episode is not trained on. cut: characters left out of a long observation. flaws:
    "invalid_tool_call" or "malformed_thinking" in the answer.
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
    flaws: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the non-empty fields as JSON, without the metadata."""
        given: dict[str, Any] = {
            "observation": [[message.role, message.content] for message in self.observation],
            "stop_strings": [*self.stop_strings],
            "rewards": dict(self.rewards),
            "flaws": [*self.flaws],
        }
        given |= {name: getattr(self, name) for name in ("answer", "dropped", "unscored", "cut")}
        said = {name: value for name, value in given.items() if value}
        return {"reward": self.reward, "terminated": self.terminated, **said}


class Ending(IntEnum):
    """An episode's end: all but the first are truncations; the last two count in no mean and no group."""

    TERMINATED = 0
    """The environment ended the episode, after an answer within its length limit."""
    ANSWER_LIMIT = 1
    """An answer reached the length limit."""
    TURN_LIMIT = 2
    """The episode reached the limit of answers."""
    NO_ROOM = 3
    """The observation and another answer would not fit into a sequence."""
    DROPPED = 4
    """The environment did not reply; the episode is not trained on."""
    UNSCORED = 5
    """The environment gave no reward, which the recipe allows; the episode is not trained on."""
