"""Where a solution or a response states its answer."""

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator

from nemo_rl_mcore.config.base import Problem, StrictModel


def _marker(text: str) -> str:
    if not text.strip():
        raise ValueError('an empty marker stands nowhere; in YAML a marker such as "####" needs its quotes')
    return text


def _pattern(text: str) -> str:
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error
    if groups != 1:
        raise ValueError(
            f"{text!r} has {groups} groups, and the answer is what one group holds; write (?:...) around others"
        )
    return text


class AnswerConfig(StrictModel):
    """Where a text states its answer; exactly one of the keys is given."""

    after: Annotated[str, AfterValidator(_marker)] | None = None
    """A marker: the answer is the line after its last place, as after `####` in GSM8K (ours)."""
    regex: Annotated[str, AfterValidator(_pattern)] | None = None
    """A regular expression of Python with one group: the answer is what the group holds in its last match (ours)."""
    boxed: bool = False
    r"""The answer is what the last \boxed{...}, \fbox{...} or \framebox{...} holds, as in MATH (ours)."""

    def problems(self) -> Iterator[Problem]:
        """Yield a section that says no way to find the answer, or several."""
        ways = {"after": self.after is not None, "regex": self.regex is not None, "boxed": self.boxed}
        given = [key for key, there in ways.items() if there]
        if len(given) != 1:
            yield Problem(
                "one-of",
                "",
                f"one way to find an answer is needed, and {' and '.join(given) or 'none'} is given",
                'give one of after: "####" (with quotes), regex: ... and boxed: true, and null or false for the others',
                tuple(ways),
            )

    def extract(self, text: str) -> str | None:
        """Return the answer that the text states; None where it states none."""
        if self.boxed:
            found = last_boxed(text)
        elif self.after is not None:
            found = _behind(text, self.after)
        else:
            assert self.regex is not None
            last = _last(re.compile(self.regex), text)
            found = None if last is None else last[1]
        return (found or "").strip() or None

    @property
    def lacking(self) -> str:
        """Return what is wrong with a text that states no answer."""
        if self.boxed:
            return r"has no closed \boxed{...} with an answer in it"
        if self.after is not None:
            return f"has no answer after {self.after!r}"
        return f"has no match of {self.regex!r} with an answer in it"


_BOX = re.compile(r"\\(?:boxed|fbox|framebox(?:\s*\[[^\[\]]*\]){0,2})\s*")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Return what the last \boxed{...}, \fbox, \framebox or \boxed 5 holds; None where it is not closed."""
    last = _last(_BOX, text)
    if last is None:
        return None
    start = last.end()
    if not text.startswith("{", start):
        token = re.compile(r"[^\s$\\{}]+").match(text, start)
        return token[0] if token else None
    depth = 0
    for brace in _BRACES.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start + 1 : brace.start()]
    return None


def _behind(text: str, marker: str) -> str | None:
    _, found, rest = text.rpartition(marker)
    return rest.strip().partition("\n")[0] if found else None


_ANSWER_IS = re.compile(r"answer(?:\s+is|\s*:)+", re.IGNORECASE)


def stated_answer(response: str) -> str:
    """Return where a response without a box most likely states its answer: after ####, "answer is", or all of it."""
    if (marked := _behind(response, "####")) is not None:
        return marked
    last = _last(_ANSWER_IS, response)
    return response if last is None else response[last.end() :].strip().partition("\n")[0]


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for match in pattern.finditer(text):
        last = match
    return last
