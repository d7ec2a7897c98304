"""Which responses give the same answer, as far as an environment can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from nemo_rl_mcore.environment.interface import Environment


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
