"""The embedded environment: a response is scored against the known answer, character by character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_mcore.data.datasets import Prompt


@dataclass(frozen=True)
class ArithmeticEnvironment:
    """Score = share of the positions of answer + end of sequence that the response gets right.

    The dense score is what lets a randomly initialised model learn: it almost never meets the exact answer.
    """

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], finished: Sequence[bool]
    ) -> list[float]:
        """Return the scores in [0, 1], in the order of the responses."""
        rows = zip(prompts, responses, finished, strict=True)
        return [character_score(prompt.answer, response, ended) for prompt, response, ended in rows]


def character_score(answer: str, response: str, finished: bool) -> float:
    """Return the share of correct positions; the end of sequence is one more, right only just after the answer."""
    correct = sum(given == wanted for given, wanted in zip(response, answer, strict=False))
    ended_in_place = finished and len(response) == len(answer)
    return (correct + ended_in_place) / (len(answer) + 1)
