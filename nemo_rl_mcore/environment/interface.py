"""What an environment implements: replies to each answer of an episode, or a score for one answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, SupportsFloat, runtime_checkable

from nemo_rl_mcore.data.datasets import Prompt

type Rewards = Iterable[SupportsFloat | None]
"""A list, a tensor or an array, of a number an answer."""


class EnvironmentReturn(NamedTuple):
    """What an environment says to B answers, after NeMo RL's tuple of this name.

    observations: a message each, with `role` and `content`; not read where the episode ends. metadata: given back with
    the next answer. next_stop_strings: end the next answer besides those of the recipe. rewards: fp [B] of these
    answers, or several such by name; an episode's is their sum. None among them ends the episode, which is then not
    scored, where the recipe has `env.unscored: drop`. terminateds: a truth value each, the episode is over. answers:
    what was read of the texts.
    """

    observations: Sequence[Mapping[str, str] | None]
    metadata: Sequence[Any]
    next_stop_strings: Sequence[Sequence[str] | None]
    rewards: Rewards | Mapping[str, Rewards]
    terminateds: Iterable[object]
    answers: Sequence[str | None] | None = None


class EnvironmentInterface(Protocol):
    """What takes part in episodes of several turns."""

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Reply to the last message of each log; nothing may be kept between calls but in the metadata.

        message_log_batch: messages with `role` and `content`; an answer also has `finished`, whether it ended by
        itself. metadata: what was said to the answer before; to the first one `prompt`, `answer`, `index` and `source`
        of the prompt, as a dict.
        """
        ...


class ScoresAnswers(Protocol):
    """An environment that only scores: an episode is one answer."""

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], finished: Sequence[bool]
    ) -> Sequence[float | None]:
        """Return one reward a response; `finished` says that it ended by itself, not at the length limit.

        None is of an answer that is not scored, where the recipe has `env.unscored: drop`.
        """
        ...


type Environment = EnvironmentInterface | ScoresAnswers


@dataclass(frozen=True)
class Vote:
    """The answer that is read of a response, and the number of the first response that gives an equal one.

    Both are None for a response without an answer.
    """

    answer: str | None
    first: int | None


@runtime_checkable
class ReadsAnswers(Protocol):
    """An environment that looks for the answer in a response."""

    def votes(self, responses: Sequence[str]) -> list[Vote]:
        """Return the vote of each response to one prompt."""
        ...


def votes_of(environment: Environment, responses: Sequence[str]) -> list[Vote]:
    """Return the votes of responses to one prompt; where the environment reads no answers, equal texts are equal."""
    if isinstance(environment, ReadsAnswers):
        return environment.votes(responses)
    return [Vote(response, responses.index(response)) for response in responses]
