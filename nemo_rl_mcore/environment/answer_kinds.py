"""What kind of answer a text is, and what stops it from being compared: told on paper, without a parser."""

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal

from nemo_rl_mcore.config.answers import AnswerConfig, last_boxed
from nemo_rl_mcore.config.base import Problem

_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")


_SEPARATOR = r"(?:\\[,;: ]|~|\{,\}|,\\!)"
_GROUPED = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)")


def ungrouped(text: str) -> str:
    r"""Return a text with numbers such as 1\,234 in one piece, of which math-verify would make a sum."""
    return _GROUPED.sub(lambda number: re.sub(r"\D", "", number[0]), text)


def bare(answer: str) -> str:
    """Return an answer without what only sets it off: dollar signs around it, stars, a full stop, gaps in numbers."""
    text = ungrouped(answer).strip(" \t\n*")
    text = text[:-1] if text.endswith(".") else text
    text = text.strip(" \t\n*")
    inner = text[1:-1]
    return inner.strip() if text[:1] == text[-1:] == "$" and inner and "$" not in inner else text


def as_words(answer: str) -> str | None:
    r"""Return the letters of an answer that is a word, several, or a choice such as (A) or \text{Yes}; case aside."""
    text = bare(_TEXT.sub(r"\1", bare(answer)))
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    letters = "".join(text.split())
    return letters.casefold() if letters.isalpha() else None


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


def as_quantity(answer: str) -> str | None:
    """Return the number of an answer such as 72 clips, 50%, 1,234 or 1.5e3, as digits, with a % where it has one."""
    match = _QUANTITY.fullmatch(bare(_TEXT.sub(r"\1", bare(answer))))
    if match is None:
        return None
    sign = "-" if match["sign"] in ("-", "\u2212") else ""
    number = Decimal(match["digits"].replace(",", "") + (match["power"] or ""))
    return f"{sign}{number:f}{'%' if match['percent'] else ''}"


_OPERATORS = re.compile(r"[=+^_\\<>{}]")
_WORD = re.compile(rf"(?<!\S)(?!(?:{_FUNCTIONS})\b)[^\W\d_]{{3,}}(?=[\s.,;:!?]|$)", re.IGNORECASE)
_SENTENCE = 3
"""So many words beside a number are a sentence, whatever signs stand among them."""


def why_unreadable(answer: str) -> str | None:
    """Return what stops an answer from being compared, as far as its text tells; None where nothing does."""
    if not answer.strip():
        return "is empty"
    if as_words(answer) or as_quantity(answer) or last_boxed(answer) is not None:
        return None
    if "\\" not in answer and re.search(r"\d\s+\d", answer):
        return "holds numbers side by side, which would be read as a sum"
    words = len(_WORD.findall(_TEXT.sub(" ", answer)))
    if words and re.search(r"\d", answer) and (words >= _SENTENCE or not _OPERATORS.search(answer)):
        return "holds words among numbers, which would be read as products of their letters"
    return None


def is_plain_number(answer: str) -> bool:
    """Return whether an answer is digits alone, of which there is nothing to doubt."""
    return _PLAIN_NUMBER.fullmatch(answer) is not None


def gold_answer(answer: str, how: AnswerConfig | None) -> tuple[str, str | None]:
    """Return the answer to score against that the data's `answer` states, and what is wrong with it, if anything."""
    if how is None:
        return answer.strip(), why_unreadable(answer)
    text = how.extract(answer)
    return ("", how.lacking) if text is None else (text, why_unreadable(text))


_SHOWN_ANSWERS = 5
"""Bad answers of a data set that are told one by one."""
_REMEDY = (
    "take it from the answer with env.math.gold or, for one source, with its key answer "
    '({after: "####"}, {boxed: true} or {regex: ...}), or mend the row'
)


def gold_problems(wrong: Sequence[str]) -> Iterator[Problem]:
    """Yield the first of the answers that cannot be scored against, each told with its place, and how many more."""
    for text in wrong[:_SHOWN_ANSWERS]:
        yield Problem("wrong-row", "env.math.gold", text, _REMEDY)
    if (rest := len(wrong) - _SHOWN_ANSWERS) > 0:
        yield Problem("wrong-row", "env.math.gold", f"{rest} more answers cannot be scored against")


def wrong_answer(place: str, answer: str, why: str) -> str:
    """Describe an answer that cannot be scored against."""
    shown = " ".join(answer.split())
    return f"{place}: the answer {shown if len(shown) <= 60 else f'...{shown[-57:]}'!r} {why}"
