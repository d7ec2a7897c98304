"""Where a solution or a response states its answer."""

import re
from typing import Annotated

from pydantic import AfterValidator

from nemo_rl_mcore.config.base import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Rule,
    Seconds,
    StrictModel,
    StrTuple,
)


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

    rules = (
        Rule(
            "one-of",
            "",
            lambda own: len(own.given) != 1,
            ("after", "regex", "boxed"),
            'give one of after: "####" (with quotes), regex: ... and boxed: true, and null or false for the others',
            says=lambda own: (
                f"one way to find an answer is needed; given: {' and '.join(own.given) or 'none'}"
            ),
        ),
    )

    @property
    def given(self) -> list[str]:
        """Return the ways to find an answer that there are."""
        ways = {"after": self.after is not None, "regex": self.regex is not None, "boxed": self.boxed}
        return [key for key, there in ways.items() if there]

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


PROCESS_START_S = 300.0
"""Deadline of the start of a process of an environment."""


class EnvPoolConfig(StrictModel):
    """The processes in which the environment runs, so that what becomes of one costs its episodes at most (ours)."""

    size: NonNegativeInt | None = None
    """Processes; 0 asks the environment where the loop runs. Null: 1 for env.math, rewards and custom, else 0."""
    timeout_s: Seconds = 120.0
    """Deadline of a reply, to up to 8 answers at once; a process that passes it is killed, and another one started."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs that Ray keeps for each process besides those of ranks and engines, such as for a reward model; a share of
    one, or whole ones. 0 hides all GPUs from it."""
    retries: NonNegativeInt = 2
    """Times that an answer without a reply is shown to the environment again, and each of them alone; then its
    episode is dropped."""
    max_drop_rate: Fraction = 0.0
    """Share of the episodes of a step, or of a batch of a validation, that may be dropped; above it the run ends."""
    variables: StrTuple = ()
    """Names of environment variables of the driver that the processes see besides those of ranks, such as the key of a
    service; neither Ray nor a log is told their values."""


OWN_TOOL_PARSERS = ("hermes", "none")
"""Names of tool_parser that need no package."""


class EndpointConfig(StrictModel):
    """Agents play the episodes and call the policy over HTTP as a model of OpenAI's API (ours).

    They are a command, run for each sample, or those of env.nemo_gym. The command finds OPENAI_BASE_URL, OPENAI_API_KEY
    and NEMO_RL_SESSION_URL in its environment, and the row of the data set, as JSON, on its standard input. It ends the
    session with a reward, or exits with 0 and has the environment of the recipe score the last answer. See
    docs/environments.md.
    """

    command: StrTuple = ()
    """The program and its arguments; no shell reads them. With env.nemo_gym the interpreter of the environment in which
    the package nemo-gym is installed; left out, python."""
    processes: PositiveInt = 8
    """Commands that run at once; NeMo Gym plays all samples at once."""
    one_process: bool = False
    """Run all servers of env.nemo_gym in one process, for those that make no tasks of Ray; false has NeMo Gym start
    Ray, and build an environment for each of them."""
    timeout_s: Seconds = 600.0
    """Deadline of an agent, from its start to the end of its session; one that passes it is killed, and started again
    as often as env.pool.retries allows."""
    tool_parser: str = "hermes"
    """How calls of tools stand in an answer: hermes, also that of Qwen, as JSON between <tool_call> and </tool_call>;
    none reads no calls; any other name is one of the library renderers, of the extra tool-parsers."""


def gym_python(section: EndpointConfig) -> str:
    """Return the interpreter that runs the servers of env.nemo_gym."""
    return section.command[0] if section.command else "python"
