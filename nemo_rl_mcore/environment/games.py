"""The embedded environments: copying or computing digits, a sum with a calculator, and guessing a number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from nemo_rl_mcore.data.datasets import PROMPT_END, Prompt, numbers_of
from nemo_rl_mcore.environment.interface import EnvironmentReturn


class ArithmeticEnvironment:
    """Scores the share of correct positions in the answer and its end of sequence.

    A randomly initialised model can learn from this dense score: it almost never gives the exact answer.
    """

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], finished: Sequence[bool]
    ) -> list[float]:
        rows = zip(prompts, responses, finished, strict=True)
        return [character_score(prompt.answer, response, ended) for prompt, response, ended in rows]


def character_score(answer: str, response: str, finished: bool) -> float:
    """Return the share of correct positions, including the end of sequence, which must directly follow the answer."""
    correct = sum(given == wanted for given, wanted in zip(response, answer, strict=False))
    ended_in_place = finished and len(response) == len(answer)
    return (correct + ended_in_place) / (len(answer) + 1)


class _TurnsEnvironment:
    """An environment whose episodes have a state, passed as metadata; an episode's return is its best answer's value.

    Values are multiples of 1/128, so that sums of rewards are exact.
    """

    kind: type[_Task] | type[_Game]

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        observations, states, rewards = list[dict[str, str]](), list[dict[str, Any]](), list[float]()
        terminateds = list[bool]()
        for log, known in zip(message_log_batch, metadata, strict=True):
            # The first answer has the metadata of its prompt.
            state = self.kind.begun(known) if "index" in known else self.kind(**known)
            after, value, observation, over = state.answered(log[-1]["content"], log[-1]["finished"])
            after = replace(after, earned=max(state.earned, value))
            observations.append({"role": "environment", "content": observation})
            states.append(asdict(after))
            rewards.append(after.earned - state.earned)
            terminateds.append(over)
        return EnvironmentReturn(observations, states, [None] * len(states), rewards, terminateds)


NO_SUM = f"e{PROMPT_END}"


@dataclass(frozen=True)
class _Task:
    """A question and its progress; shown: the last result; called: the call's value, up to 1/2."""

    question: str
    answer: str
    shown: str | None = None
    called: float = 0.0
    earned: float = 0.0

    @classmethod
    def begun(cls, known: Mapping[str, Any]) -> Self:
        """Return a prompt's task by its index, ignoring any text around the prompt."""
        answer = known["answer"]
        return cls("+".join(numbers_of(known["index"], 2, (len(answer) - 1) // 2)), answer)

    def answered(self, text: str, finished: bool) -> tuple[Self, float, str, bool]:
        """Return the task after an answer, the answer's value, the observation, and True at the episode's end."""
        if finished and text == self.answer:
            return self, 1.0, "", True
        if self.shown is not None and "+" not in text:
            read = character_score(self.shown, text, finished)
            return self, int(64 * self.called * (1 + read)) / 64, "", True
        called = int(32 * character_score(self.question, text, finished)) / 64
        # Numbers of at most nine digits, joined by +.
        if not finished or re.fullmatch(r"[0-9]{1,9}(\+[0-9]{1,9})*", text) is None:
            return self, called, NO_SUM, False
        shown = f"{sum(map(int, text.split('+'))):0{len(self.answer)}d}"
        return replace(self, shown=shown, called=called), called, f"{shown}{PROMPT_END}", False


class CalculatorEnvironment(_TurnsEnvironment):
    """The prompt asks for a sum, "37+25>"; the first answer is a call, "37+25", whose value is shown, "00062>".

    The value has as many digits as the answer, so that reading it is like copying the question.

    If an answer is no sum, the calculator replies `e>`, and the next answer is a call again. After a value, an answer
    without a plus sign is the last one. An episode with the right answer earns 1, with or without a call. Others earn
    half the share of correct positions in their best call, and up to as much again for the share of correct positions
    in the last answer, compared with the shown value: reading is learnt long before calls are right.
    """

    kind = _Task


HIGHER, LOWER, NO_GUESS = f"h{PROMPT_END}", f"l{PROMPT_END}", f"e{PROMPT_END}"
_BEGUN = 1 / 128


@dataclass(frozen=True)
class _Game:
    """A secret and its current bounds, inclusive; numbers: size of the range at first."""

    secret: int
    digits: int
    lowest: int
    highest: int
    numbers: int
    earned: float = 0.0

    @classmethod
    def begun(cls, known: Mapping[str, Any]) -> Self:
        """Return a prompt's game by its index, ignoring any text around the prompt."""
        digits = len(known["answer"])
        lowest, highest, secret = map(int, numbers_of(known["index"], 3, digits))
        return cls(secret, digits, lowest, highest, highest - lowest + 1)

    def answered(self, text: str, finished: bool) -> tuple[Self, float, str, bool]:
        """Return the game after an answer, the answer's value, the observation, and True at the episode's end."""
        start = text[: self.digits]
        if len(start) < self.digits or not (start.isascii() and start.isdigit()):
            return self, 0.0, NO_GUESS, False
        guess = int(start)
        if not finished or text != start:
            return self, _BEGUN if self.lowest <= guess <= self.highest else 0.0, NO_GUESS, False
        if guess == self.secret:
            return self, 1.0, "", True
        if guess < self.secret:
            game, observation = replace(self, lowest=max(self.lowest, guess + 1)), HIGHER
        else:
            game, observation = replace(self, highest=min(self.highest, guess - 1)), LOWER
        # Half the share of the numbers that are ruled out, rounded up.
        ruled_out = game.numbers - (game.highest - game.lowest + 1)
        return game, -(-32 * ruled_out // game.numbers) / 64, observation, False


class GuessNumberEnvironment(_TurnsEnvironment):
    """The prompt gives two bounds, "27>", and an answer is a guess: a number of as many digits, and no more.

    An episode that finds the number earns 1. Other episodes earn half the share of the numbers that their guesses have
    ruled out, in sixty-fourths, and without a guess 1/128 for an answer that begins with one of the numbers: a randomly
    initialised model needs some first reward.
    """

    kind = _Game
