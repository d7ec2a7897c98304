"""The embedded tool: a sum is to be computed, and a calculator is there to be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from nemo_rl_mcore.data.datasets import PROMPT_END, numbers_of
from nemo_rl_mcore.environment.arithmetic import character_score
from nemo_rl_mcore.environment.interface import EnvironmentReturn
from nemo_rl_mcore.environment.said import Said, is_number, returned

NO_SUM = f"e{PROMPT_END}"
_MOST_DIGITS = 9


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
        """See `EnvironmentInterface.step`."""
        rows = zip(message_log_batch, metadata, strict=True)
        return returned(
            [_Task.of(said).answered(log[-1]["content"], log[-1]["finished"]) for log, said in rows]
        )


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

    def answered(self, text: str, finished: bool) -> Said:
        """Return what is said to an answer."""
        if finished and text == self.answer:
            return self._said("", 1.0, terminated=True)
        if self.shown is not None and "+" not in text:
            read = character_score(self.shown, text, finished)
            return self._said("", _whole_64ths(self.called * (1 + read)), terminated=True)
        called = _whole_64ths(character_score(self.question, text, finished) / 2)
        value = value_of(text) if finished else None
        if value is None:
            return self._said(NO_SUM, called)
        shown = f"{value:0{len(self.answer)}d}"
        return replace(self, shown=shown, called=called)._said(f"{shown}{PROMPT_END}", called)

    def _said(self, observation: str, worth: float, *, terminated: bool = False) -> Said:
        """worth: of all that was answered so far; no answer takes anything back."""
        task = replace(self, earned=max(self.earned, worth))
        return Said(task.earned - self.earned, terminated, observation, asdict(task))


def value_of(text: str) -> int | None:
    """Return the value of numbers joined by `+`; None for any other text, and for numbers of more than nine digits."""
    numbers = text.split("+")
    if not all(is_number(number) and len(number) <= _MOST_DIGITS for number in numbers):
        return None
    return sum(map(int, numbers))


def _whole_64ths(worth: float) -> float:
    return int(64 * worth) / 64
