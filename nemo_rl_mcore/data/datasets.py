"""Where prompts come from: deterministic generators keyed by (seed, step), with a stable held-out share."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from nemo_rl_mcore.config.data import TURN_TASKS
from nemo_rl_mcore.data.messages import NO_EXTRAS, Extras, Message
from nemo_rl_mcore.errors import RefusedError

PROMPT_END = ">"
_HELD_OUT_ONE_IN = 10
_STREAM = "nemo_rl_mcore.prompts"


@dataclass(frozen=True)
class Prompt:
    """One question with its verifiable answer."""

    index: int
    """Stable id in the data source; the key of the sampling noise."""
    text: str
    answer: str
    """What a response is scored against."""
    rejected: str | None = None
    """The answer to move away from, where the data set has pairs."""
    context: tuple[Message, ...] = ()
    """The conversation that the text is rendered from by a chat template; empty where the text is plain."""
    imitate_all: bool = False
    """Every assistant turn of the context is to be imitated, not the answer alone."""
    solution: str | None = None
    """What is imitated, where that is more than the answer, such as the steps that lead to it."""
    source: str = ""
    """The name of its source, where there are several."""
    place: str = field(default="", compare=False)
    """Where the data source has it, such as a file and its line, for messages alone."""
    columns: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    """Further columns of its row, which reward functions read."""
    literal: tuple[tuple[int, int], ...] = ()
    """Special tokens of the text that the data spells: they are encoded as text, see `data.literal_text`."""
    extras: Extras = NO_EXTRAS
    """What its row has besides texts, where it is a conversation."""

    @property
    def imitated(self) -> str:
        """Return the answer to imitate: the solution or, where there is none, the answer."""
        return self.answer if self.solution is None else self.solution


class PromptSource(Protocol):
    """What an algorithm draws its prompts from."""

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        """Draw `count` different prompts; the same (seed, step) gives the same prompts."""
        ...

    def validation(self, count: int | None) -> list[Prompt]:
        """Give `count` held-out prompts, the same ones at every call and for every seed.

        None is all of them, which a recipe asks of files alone.
        """
        ...

    def first_steps(self, step: int, count: int) -> Sequence[int] | None:
        """Return, of each prompt of `train_batch(step, count)`, the first step that draws it.

        None where the source has no passes, so that nobody knows which prompts come again.
        """
        return None


DIGIT_TASKS: dict[str, Callable[[str], str]] = {
    "copy": lambda digits: digits,
    "reverse": lambda digits: digits[::-1],
    "sort": lambda digits: "".join(sorted(digits)),
    "increment": lambda digits: "".join(str((int(digit) + 1) % 10) for digit in digits),
}
"""The answer to a string of digits."""


class DigitTaskSource(PromptSource):
    """All strings of `num_digits` digits with the answer that the task defines: copy of "527>" is "527".

    calculator: the digits are two numbers, "37+25>", and the answer is their sum, of as many places as the question:
    "00062". guess_number: they are two bounds, and there is a prompt "27>" for each number from the one to the other,
    which is the answer.

    A tenth is held out by a hash of the text, the same tenth for every task of one answer and every seed, so that a
    model trained on one task and then another never sees a validation prompt.

    count_keys: the keys that ask for the prompts of a step and of a validation, which an error names.
    """

    def __init__(
        self, task: str, num_digits: int, seed: int, count_keys: tuple[str, str] = ("count", "count")
    ) -> None:
        if task not in (*DIGIT_TASKS, *TURN_TASKS):
            raise RefusedError(
                f"unknown task {task!r}; known tasks: {', '.join((*DIGIT_TASKS, *TURN_TASKS))}",
                code="unknown-task",
            )
        if num_digits < 1:
            raise RefusedError(f"data.num_digits must be at least 1, got {num_digits}", code="num-digits")
        self._task = task
        self._num_digits = num_digits
        hidden = num_digits // 2 if task == "guess_number" else 0
        self._index_digits = num_digits + hidden
        self._seed = seed
        self._step_key, self._validation_key = count_keys

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        """Draw without replacement within the step; ValueError when the pool is smaller than `count`."""
        order = shuffled(10**self._index_digits, key=f"train:{self._seed}:{step}")
        return self._take(order, count, held_out=False, count_key=self._step_key)

    def validation(self, count: int | None) -> list[Prompt]:
        """Give the first `count` held-out prompts of one fixed order."""
        assert count is not None  # the rules ask a number of an embedded task
        order = shuffled(10**self._index_digits, key="validation")
        return self._take(order, count, held_out=True, count_key=self._validation_key)

    def _take(self, order: Iterator[int], count: int, *, held_out: bool, count_key: str) -> list[Prompt]:
        candidates = (self._prompt(index) for index in order)
        pool = (prompt for prompt in candidates if prompt and is_held_out(prompt.text) == held_out)
        prompts = list(islice(pool, count))
        if len(prompts) < count:
            share = "held-out prompts" if held_out else "training prompts"
            raise RefusedError(
                f"{count_key}={count} exceeds the {len(prompts)} {share} that exist with "
                f"data.num_digits={self._num_digits}; lower the first or raise the second",
                code="too-few-rows",
            )
        return prompts

    def _prompt(self, index: int) -> Prompt | None:
        """Return the prompt of an index; None where it is none."""
        width = self._num_digits // 2
        match self._task:
            case "calculator":
                first, second = numbers_of(index, 2, width)
                return Prompt(
                    index,
                    f"{first}+{second}{PROMPT_END}",
                    f"{int(first) + int(second):0{self._num_digits + 1}d}",
                )
            case "guess_number":
                lowest, highest, secret = numbers_of(index, 3, width)
                if not lowest <= secret <= highest or lowest == highest:
                    return None
                return Prompt(index, f"{lowest}{highest}{PROMPT_END}", secret)
            case task:
                digits = f"{index:0{self._index_digits}d}"
                return Prompt(index, digits + PROMPT_END, DIGIT_TASKS[task](digits))


def numbers_of(index: int, count: int, width: int) -> list[str]:
    """Return the numbers of `width` digits each that the index of a prompt is made of."""
    digits = f"{index:0{count * width}d}"
    return [digits[start : start + width] for start in range(0, count * width, width)]


def is_held_out(text: str) -> bool:
    """Tell whether a prompt belongs to the held-out tenth; depends on the text alone."""
    digest = hashlib.sha256(f"held-out:{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0


def shuffled(size: int, key: str) -> Iterator[int]:
    """Yield 0..size-1 in a random order set by `key`: Fisher-Yates, storing only the entries it moved."""
    generator = random.Random(f"{_STREAM}:{key}")
    moved: dict[int, int] = {}
    for position in range(size):
        chosen = generator.randrange(position, size)
        yield moved.get(chosen, chosen)
        moved[chosen] = moved.pop(position, position)
