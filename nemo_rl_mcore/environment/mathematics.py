"""Mathematical answers, compared by `math-verify`: 1 for an equal expression, 0 for any other response."""

# math-verify leaves parameters of its functions untyped.
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nemo_rl_mcore.config.answers import AnswerConfig, last_boxed, stated_answer
from nemo_rl_mcore.config.base import ConfigError
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.environment.answer_kinds import (
    as_quantity,
    as_words,
    bare,
    gold_answer,
    gold_problems,
    is_plain_number,
    ungrouped,
    wrong_answer,
)
from nemo_rl_mcore.environment.votes import Vote
from nemo_rl_mcore.errors import RefusedError, RunStoppedError, shortened

type Unparsable = Literal["refuse", "drop", "zero"]


@dataclass(frozen=True)
class _Answer:
    """What a text means: the letters of words, and what math-verify reads of it, the best reading first.

    alone: the text is the answer and no more, so that other words are another answer.
    """

    words: str | None
    readings: list[Any]
    alone: bool = True

    @property
    def expressions(self) -> list[Any]:
        """Return the readings without the text itself, which math-verify compares where it reads nothing better."""
        return [reading for reading in self.readings if not isinstance(reading, str)]

    @property
    def shown(self) -> str | None:
        """Return the answer as text, None where there is none."""
        texts = [reading for reading in self.readings if isinstance(reading, str)]
        return self.words or next(iter([*texts, *map(str, self.readings)]), None)


_NOTHING = _Answer(None, [])
_BOXED = AnswerConfig(boxed=True)


@dataclass(frozen=True)
class MathEnvironment:
    """Score = whether the final answer of the response equals the one that the data's answer states.

    Words are compared by their letters, all else as expressions. Without `response` the answer is what the last box
    holds; where there is no box, math-verify looks for the expression in the whole response.
    timeout_s: seconds to read an expression, and to compare two, after which the response is wrong. It is kept by a
    signal, so that scores are computed in the main thread. unparsable: what becomes of answers of the data that nothing
    can equal; unless they are refused, each response to one scores 0.
    """

    timeout_s: int
    gold: AnswerConfig | None = None
    response: AnswerConfig | None = None
    unparsable: Unparsable = "refuse"

    def __post_init__(self) -> None:
        _library()

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], finished: Sequence[bool]
    ) -> list[float]:
        """1 or 0 for each response, in their order; RunStoppedError for an answer that is refused."""
        golds: dict[str, _Answer] = {}
        for prompt in prompts:
            if prompt.answer not in golds:
                golds[prompt.answer], why = self._gold(prompt.answer)
                if why is not None and self.unparsable == "refuse":
                    raise RunStoppedError(
                        f"env.math.gold: {wrong_answer(_place(prompt), prompt.answer, why)}"
                    )
        rows = zip(prompts, responses, strict=True)
        return [float(self._equal(golds[prompt.answer], self._said(response))) for prompt, response in rows]

    def votes(self, responses: Sequence[str]) -> list[Vote]:
        """See `ReadsAnswers.votes`; answers are equal as they are for scores, each to the first of its kind."""
        said = [self._said(response) for response in responses]
        kinds: list[int] = []
        votes: list[Vote] = []
        for place, answer in enumerate(said):
            first = None
            if answer.shown is not None:
                first = next((kind for kind in kinds if self._equal(said[kind], answer)), place)
                kinds += [place] if first == place else []
            votes.append(Vote(answer.shown, first))
        return votes

    def require_answers(self, prompts: Sequence[Prompt]) -> None:
        """Raise ConfigError for answers that cannot be scored against, naming where the data has them."""
        why = self.wrong_answers(prompts)
        wrong = [
            wrong_answer(_place(prompt), prompt.answer, why[prompt.answer])
            for prompt in prompts
            if prompt.answer in why
        ]
        if wrong:
            raise ConfigError(gold_problems(wrong))

    def wrong_answers(self, prompts: Sequence[Prompt]) -> dict[str, str]:
        """Return why nothing can equal answers, of those where nothing can; each is read once, in some milliseconds."""
        why = {answer: self._why_unequal(answer) for answer in dict.fromkeys(p.answer for p in prompts)}
        return {answer: reason for answer, reason in why.items() if reason is not None}

    def _gold(self, given: str) -> tuple[_Answer, str | None]:
        """Return what an answer of the data means, and why nothing can be compared with it, if so."""
        text, why = gold_answer(given, self.gold)
        if why is not None:
            return _NOTHING, why
        answer = self._read(text)
        unread = answer.words is None and not answer.expressions
        return answer, f"holds no expression that math-verify reads in {self.timeout_s} s" if unread else None

    def _why_unequal(self, given: str) -> str | None:
        """Return why nothing, or not even itself, equals an answer of the data; None where all is well."""
        text, why = gold_answer(given, self.gold)
        if why is not None or is_plain_number(text):
            return why
        gold, why = self._gold(given)
        if why is not None or gold.words is not None:
            return why
        if self._equal(_Answer(None, gold.expressions), self._read(text)):
            return None
        return f"does not equal itself, as math-verify compares it in {self.timeout_s} s"

    def _said(self, response: str) -> _Answer:
        """Return the answer that a response gives."""
        where = self.response or (_BOXED if last_boxed(response) is not None else None)
        if where is not None:
            text = where.extract(response)
            return _NOTHING if text is None else self._read(text)
        return _Answer(as_words(stated_answer(response)), self._parse(ungrouped(response)), alone=False)

    def _read(self, text: str) -> _Answer:
        """Return the answer that a text is."""
        number = as_quantity(text)
        if number is not None and number.endswith("%"):
            return _Answer(None, self._parse(number))
        _, _, boxed = _library()
        return _Answer(as_words(text), self._parse(f"\\boxed{{{number or bare(text)}}}", boxed))

    def _parse(self, text: str, *how: Any) -> list[Any]:
        read, _, _ = _library()
        return read(text, *how, parsing_timeout=self.timeout_s)

    def _equal(self, gold: _Answer, said: _Answer) -> bool:
        if gold.words is not None and said.words is not None and (said.alone or gold.words == said.words):
            return gold.words == said.words
        _, equal, _ = _library()
        return equal(gold.readings, said.readings, timeout_seconds=self.timeout_s)


def _place(prompt: Prompt) -> str:
    return prompt.place or f"prompt {prompt.index}"


def _library() -> tuple[Callable[..., Any], Callable[..., Any], list[Any]]:
    """`parse`, `verify` and how answers are parsed; ValueError when the package is not there."""
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise RefusedError(
            f"env.math: needs the Python package math_verify ({error}); install the extra math, or set env.math: null",
            code="missing-package",
        ) from error
    logging.getLogger("math_verify.parser").addFilter(_SHORT)  # which it has once, however often it is added
    return parse, verify, [LatexExtractionConfig()]


class _Short(logging.Filter):
    """Cuts a message, which quotes the whole answer that took too long to read."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True: each record is logged."""
        record.msg, record.args = shortened(record.getMessage(), _LOGGED), ()
        return True


_LOGGED = 500
_SHORT = _Short()
