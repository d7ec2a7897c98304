"""Mathematical answers, compared by `math-verify`: 1 for an equal expression, 0 for any other response."""

# math-verify leaves parameters of its functions untyped.
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.config.environment import AnswerConfig, last_boxed, stated_answer
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.environment.interface import Vote
from nemo_rl_mcore.errors import RefusedError, RunStoppedError, shortened

_SHOWN_ANSWERS = 5
"""Maximum number of a data set's bad answers that are reported individually."""


@dataclass(frozen=True)
class _Meaning:
    """A text's meaning: the letters of words, and math-verify's readings, the best one first.

    readings: expressions, and a string where math-verify compares the text itself. alone: the text is only the answer,
    so that other words are another answer.
    """

    words: str | None
    readings: list[Any]
    alone: bool = True


_NOTHING = _Meaning(None, [])
_BOXED = AnswerConfig(boxed=True)


@dataclass(frozen=True)
class MathEnvironment:
    """Scores 1 if a response's final answer equals the data's answer, else 0.

    Words are compared by their letters, everything else as expressions. Without `response` the answer is the content of
    the last box; without a box, math-verify searches the whole response. timeout_s: limit for reading an expression,
    and for comparing two, after which the response is wrong; enforced by a signal, so that scores are computed in the
    main thread. unparsable: treatment of answers in the data that no response can equal; unless they are refused, all
    responses to them score 0.
    """

    timeout_s: int
    gold: AnswerConfig | None = None
    response: AnswerConfig | None = None
    unparsable: Literal["refuse", "drop", "zero"] = "refuse"

    def __post_init__(self) -> None:
        _library()

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], finished: Sequence[bool]
    ) -> list[float]:
        """Return 1 or 0 per response, in order; raises RunStoppedError for a refused answer."""
        golds: dict[str, _Meaning] = {}
        for prompt in prompts:
            if prompt.answer not in golds:
                golds[prompt.answer], why = self._gold(prompt.answer)
                if why is not None and self.unparsable == "refuse":
                    raise RunStoppedError(f"env.math.gold: {_wrong_answer(prompt, why)}")
        rows = zip(prompts, responses, strict=True)
        return [float(self._equal(golds[prompt.answer], self._said(response))) for prompt, response in rows]

    def votes(self, responses: Sequence[str]) -> list[Vote]:
        """Return each response's vote; answers are compared as for scores."""
        said, votes = [self._said(response) for response in responses], list[Vote]()
        for place, answer in enumerate(said):
            texts = [reading for reading in answer.readings if isinstance(reading, str)]
            shown, first = answer.words or next(iter([*texts, *map(str, answer.readings)]), None), None
            if shown is not None:
                kinds = (kind for kind, vote in enumerate(votes) if vote.first == kind)
                first = next((kind for kind in kinds if self._equal(said[kind], answer)), place)
            votes.append(Vote(shown, first))
        return votes

    def require_answers(self, prompts: Sequence[Prompt]) -> None:
        """Raise ConfigError for answers that cannot be scored against, naming their places in the data."""
        why = self.wrong_answers(prompts)
        wrong = [_wrong_answer(one, why[one.answer]) for one in prompts if one.answer in why]
        remedy = (
            "take it from the answer with env.math.gold or, for one source, with its key answer "
            '({after: "####"}, {boxed: true} or {regex: ...}), or correct the row'
        )
        problems = [Problem("wrong-row", "env.math.gold", text, remedy) for text in wrong[:_SHOWN_ANSWERS]]
        if (rest := len(wrong) - _SHOWN_ANSWERS) > 0:
            what = f"{rest} more answers cannot be scored against"
            problems.append(Problem("wrong-row", "env.math.gold", what))
        if problems:
            raise ConfigError(problems)

    def wrong_answers(self, prompts: Sequence[Prompt]) -> dict[str, str]:
        """Return the answers that no response can equal, with the reasons; parsing takes some milliseconds each."""
        why: dict[str, str] = {}
        for given in dict.fromkeys(prompt.answer for prompt in prompts):
            text = given.strip() if self.gold is None else self.gold.extract(given)
            if text is not None and _PLAIN_NUMBER.fullmatch(text):
                continue
            gold, reason = self._gold(given)
            if reason is None and gold.words is None:
                # Without its text, which would equal itself.
                expressions = [reading for reading in gold.readings if not isinstance(reading, str)]
                if not self._equal(_Meaning(None, expressions), self._read(text or "")):
                    reason = f"does not equal itself, as math-verify compares it in {self.timeout_s} s"
            if reason is not None:
                why[given] = reason
        return why

    def _gold(self, given: str) -> tuple[_Meaning, str | None]:
        """Parse a data answer; also return the reason why no response can equal it, or None."""
        text = given.strip() if self.gold is None else self.gold.extract(given)
        if text is None:
            assert self.gold is not None
            return _NOTHING, self.gold.lacking
        if is_sentence(text):
            return _NOTHING, "is a sentence, whose words would be read as products of their letters"
        answer = self._read(text)
        unread = answer.words is None and all(isinstance(reading, str) for reading in answer.readings)
        return answer, f"holds no expression that math-verify reads in {self.timeout_s} s" if unread else None

    def _said(self, response: str) -> _Meaning:
        where = self.response or (_BOXED if last_boxed(response) is not None else None)
        if where is not None:
            text = where.extract(response)
            return _NOTHING if text is None else self._read(text)
        parse, _, _ = _library()
        readings = parse(ungrouped(response), parsing_timeout=self.timeout_s)
        return _Meaning(as_words(stated_answer(response)), readings, alone=False)

    def _read(self, text: str) -> _Meaning:
        parse, _, in_box = _library()
        number = as_quantity(text)
        if number is not None and number.endswith("%"):
            return _Meaning(None, parse(number, parsing_timeout=self.timeout_s))
        boxed = f"\\boxed{{{number or bare(text)}}}"
        return _Meaning(as_words(text), parse(boxed, in_box, parsing_timeout=self.timeout_s))

    def _equal(self, gold: _Meaning, said: _Meaning) -> bool:
        if gold.words is not None and said.words is not None and (said.alone or gold.words == said.words):
            return gold.words == said.words
        _, equal, _ = _library()
        return equal(gold.readings, said.readings, timeout_seconds=self.timeout_s)


def _wrong_answer(prompt: Prompt, why: str) -> str:
    shown = " ".join(prompt.answer.split())
    shown = shown if len(shown) <= 60 else f"...{shown[-57:]}"
    return f"{prompt.place or f'prompt {prompt.index}'}: the answer {shown!r} {why}"


# Texts that math-verify would misread

_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_SEPARATOR = r"(?:\\[,;: ]|~|\{,\}|,\\!)"
_GROUPED = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)")
_NUMBER = (
    r"(?P<sign>[-+\u2212]?)(?:\\?\$|[€£¥])?(?P<digits>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
    r"(?P<power>[eE][-+]?\d{1,3})?"
)
_SCALES = "hundred|thousand|million|billion|trillion|dozen"
_FUNCTIONS = "sin|cos|tan|cot|arcsin|arccos|arctan|log|exp|sqrt|mod|gcd|lcm"
# A word of two letters may be a product of variables.
_UNIT = (
    r"(?:\s*(?P<percent>\\?%|percent\b)"
    rf"|\s+(?!(?i:{_SCALES}|{_FUNCTIONS})s?\b)(?P<unit>[^\W\d_]{{3,}}(?:\s+[^\W\d_]+)*))"
)
_QUANTITY = re.compile(f"{_NUMBER}{_UNIT}?")
_PLAIN_NUMBER = re.compile(r"-?\d{1,30}(?:\.\d{1,10})?")
_WORD = re.compile(rf"(?<!\S)(?!(?:{_FUNCTIONS})\b)[^\W\d_]{{3,}}(?=[\s.,;:!?]|$)", re.IGNORECASE)
_SENTENCE = 3
"""Number of words next to a number, outside \\text, that make a sentence."""


def ungrouped(text: str) -> str:
    r"""Join the digits of numbers such as 1\,234, which math-verify would read as sums."""
    return _GROUPED.sub(lambda number: re.sub(r"\D", "", number[0]), text)


def bare(answer: str) -> str:
    """Return an answer without surrounding dollar signs, stars, a full stop, or gaps in numbers."""
    text = ungrouped(answer).strip(" \t\n*").removesuffix(".").strip(" \t\n*")
    inner = text[1:-1]
    return inner.strip() if text[:1] == text[-1:] == "$" and inner and "$" not in inner else text


def as_words(answer: str) -> str | None:
    r"""Return the case-folded letters of an answer in words, or of a choice such as (A) or \text{Yes}; else None."""
    text = bare(_TEXT.sub(r"\1", bare(answer)))
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    letters = "".join(text.split())
    return letters.casefold() if letters.isalpha() else None


def as_quantity(answer: str) -> str | None:
    """Return the number of an answer such as 72 clips, 50%, 1,234 or 1.5e3, as digits, with its %."""
    match = _QUANTITY.fullmatch(bare(_TEXT.sub(r"\1", bare(answer))))
    if match is None:
        return None
    sign = "-" if match["sign"] in ("-", "\u2212") else ""
    number = Decimal(match["digits"].replace(",", "") + (match["power"] or ""))
    return f"{sign}{number:f}{'%' if match['percent'] else ''}"


def is_sentence(answer: str) -> bool:
    """Return True for a sentence with a number in it, such as a whole solution."""
    if as_words(answer) or as_quantity(answer) or last_boxed(answer) is not None:
        return False
    return bool(re.search(r"\d", answer)) and len(_WORD.findall(_TEXT.sub(" ", answer))) >= _SENTENCE


def _library() -> tuple[Callable[..., Any], Callable[..., Any], list[Any]]:
    """Return `parse`, `verify` and the extraction from a box; ValueError without the package."""
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        what = f"env.math: needs the Python package math_verify ({error})"
        remedy = "install the extra math, or set env.math: null"
        raise RefusedError(f"{what}; {remedy}", code="missing-package") from error
    logging.getLogger("math_verify.parser").addFilter(_shorten)  # once, however often it is added
    return parse, verify, [LatexExtractionConfig()]


def _shorten(record: logging.LogRecord) -> bool:
    """Shorten a message that quotes the whole answer that took too long to read; every record is logged."""
    record.msg, record.args = shortened(record.getMessage(), 500), ()
    return True
