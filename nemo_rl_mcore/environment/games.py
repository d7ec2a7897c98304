"""The embedded environments: digits to copy or compute, a sum with a calculator, and a number to be found."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Self

from nemo_rl_mcore.data.datasets import PROMPT_END, Prompt, numbers_of
from nemo_rl_mcore.environment.interface import EnvironmentReturn


class Answered(NamedTuple):
    """To one answer. reward: of it, a multiple of 1/128, so that sums are exact; state: of the episode."""

    reward: float
    terminated: bool
    observation: str
    state: dict[str, Any]


def _step(
    kind: type[_Task] | type[_Game], logs: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[Any]
) -> EnvironmentReturn:
    rows = zip(logs, metadata, strict=True)
    said = [kind.of(known).answered(log[-1]["content"], log[-1]["finished"]) for log, known in rows]
    return EnvironmentReturn(
        observations=[{"role": "environment", "content": one.observation} for one in said],
        metadata=[one.state for one in said],
        next_stop_strings=[None] * len(said),
        rewards=[one.reward for one in said],
        terminateds=[one.terminated for one in said],
    )


@dataclass(frozen=True)
class ArithmeticEnvironment:
    """Score = share of the positions of answer + end of sequence that the response gets right.

    The dense score is what lets a randomly initialised model learn: it almost never meets the exact answer.
    """

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], finished: Sequence[bool]
    ) -> list[float]:
        rows = zip(prompts, responses, finished, strict=True)
        return [character_score(prompt.answer, response, ended) for prompt, response, ended in rows]


def character_score(answer: str, response: str, finished: bool) -> float:
    """Return the share of correct positions; the end of sequence is one more, right only just after the answer."""
    correct = sum(given == wanted for given, wanted in zip(response, answer, strict=False))
    ended_in_place = finished and len(response) == len(answer)
    return (correct + ended_in_place) / (len(answer) + 1)


NO_SUM = f"e{PROMPT_END}"


@dataclass(frozen=True)
class CalculatorEnvironment:
    """The prompt asks for a sum, "37+25>"; the first answer is a call, "37+25", whose value is shown, "00062>".

    It is shown in as many places as the question has, so that reading it is what copying the question is.

    An answer that the calculator does not understand is told so, and the next one is a call again. After a value, an
    answer without a sign is the last one. The right one earns 1, whether or not anything was computed. Another episode
    earns half of what its best call has in common with the question, and up to as much again for the last answer, by
    what it has in common with the value that it was shown: reading is learnt long before calls are right.
    """

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        return _step(_Task, message_log_batch, metadata)


@dataclass(frozen=True)
class _Task:
    """A question, and how far it is; shown: the last value, called: what its call is worth, up to 1/2."""

    question: str
    answer: str
    shown: str | None = None
    called: float = 0.0
    earned: float = 0.0

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Self:
        """Return the task that metadata tell of; those of a prompt by its index, whatever stands around its text."""
        if "index" not in metadata:
            return cls(**metadata)
        answer = metadata["answer"]
        return cls("+".join(numbers_of(metadata["index"], 2, (len(answer) - 1) // 2)), answer)

    def answered(self, text: str, finished: bool) -> Answered:
        if finished and text == self.answer:
            return self._said("", 1.0, terminated=True)
        if self.shown is not None and "+" not in text:
            read = character_score(self.shown, text, finished)
            return self._said("", int(64 * self.called * (1 + read)) / 64, terminated=True)
        called = int(32 * character_score(self.question, text, finished)) / 64
        value = value_of(text) if finished else None
        if value is None:
            return self._said(NO_SUM, called)
        shown = f"{value:0{len(self.answer)}d}"
        return replace(self, shown=shown, called=called)._said(f"{shown}{PROMPT_END}", called)

    def _said(self, observation: str, worth: float, *, terminated: bool = False) -> Answered:
        task = replace(self, earned=max(self.earned, worth))
        return Answered(task.earned - self.earned, terminated, observation, asdict(task))


def value_of(text: str) -> int | None:
    """Return the value of numbers joined by `+`; None for any other text, and for numbers of more than nine digits."""
    if re.fullmatch(r"[0-9]{1,9}(\+[0-9]{1,9})*", text) is None:
        return None
    return sum(map(int, text.split("+")))


HIGHER, LOWER, NO_GUESS = f"h{PROMPT_END}", f"l{PROMPT_END}", f"e{PROMPT_END}"
_BEGUN = 1 / 128


@dataclass(frozen=True)
class GuessNumberEnvironment:
    """The prompt gives two bounds, "27>", and an answer is a guess: a number of as many digits, and no more.

    An episode that finds the number earns 1. Another one earns half the share of the numbers that its guesses have
    ruled out, in sixty-fourths, and where there is none a bit for an answer that begins with one of the numbers: a
    randomly initialised model has to start from something.
    """

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        return _step(_Game, message_log_batch, metadata)


@dataclass(frozen=True)
class _Game:
    """What is known: the secret is one of lowest..highest, which were so many numbers at first."""

    secret: int
    digits: int
    lowest: int
    highest: int
    numbers: int
    earned: float = 0.0

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Self:
        """Return the game that metadata tell of; those of a prompt by its index, whatever stands around its text."""
        if "index" not in metadata:
            return cls(**metadata)
        digits = len(metadata["answer"])
        lowest, highest, secret = map(int, numbers_of(metadata["index"], 3, digits))
        return cls(secret, digits, lowest, highest, highest - lowest + 1)

    def answered(self, answer: str, finished: bool) -> Answered:
        start = answer[: self.digits]
        if len(start) < self.digits or not (start.isascii() and start.isdigit()):
            return self._said(NO_GUESS, 0.0)
        guess = int(start)
        if not finished or answer != start:
            return self._said(NO_GUESS, _BEGUN if self.lowest <= guess <= self.highest else 0.0)
        if guess == self.secret:
            return self._said("", 1.0)
        if guess < self.secret:
            game, observation = replace(self, lowest=max(self.lowest, guess + 1)), HIGHER
        else:
            game, observation = replace(self, highest=min(self.highest, guess - 1)), LOWER
        # Half the share of the numbers that are ruled out, rounded up.
        ruled_out = game.numbers - (game.highest - game.lowest + 1)
        return game._said(observation, -(-32 * ruled_out // game.numbers) / 64)

    def _said(self, observation: str, worth: float) -> Answered:
        game = replace(self, earned=max(self.earned, worth))
        return Answered(game.earned - self.earned, worth == 1, observation, asdict(game))
