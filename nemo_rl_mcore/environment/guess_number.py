"""The embedded game: a number is to be found, and each guess is told whether the number is higher or lower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from nemo_rl_mcore.data.datasets import PROMPT_END, numbers_of
from nemo_rl_mcore.environment.interface import EnvironmentReturn
from nemo_rl_mcore.environment.said import Said, is_number, returned

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
        """See `EnvironmentInterface.step`."""
        rows = zip(message_log_batch, metadata, strict=True)
        return returned(
            [_Game.of(said).guessed(log[-1]["content"], log[-1]["finished"]) for log, said in rows]
        )


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

    def guessed(self, answer: str, finished: bool) -> Said:
        """Return what is said to an answer."""
        start = answer[: self.digits]
        if len(start) < self.digits or not is_number(start):
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
        return game._said(observation, game._progress)

    @property
    def _progress(self) -> float:
        """Return half the share of the numbers that are ruled out, rounded up."""
        ruled_out = self.numbers - (self.highest - self.lowest + 1)
        return -(-32 * ruled_out // self.numbers) / 64

    def _said(self, observation: str, worth: float) -> Said:
        """worth: of all that was answered so far; no answer takes anything back."""
        game = replace(self, earned=max(self.earned, worth))
        return Said(game.earned - self.earned, worth == 1, observation, asdict(game))
