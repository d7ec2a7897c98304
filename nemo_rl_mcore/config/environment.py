"""The environments' processes, the agents' endpoint, and the answer's location within a solution or a response."""

import re
from collections.abc import Iterator
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
        raise ValueError('the marker is empty; in YAML, a marker such as "####" must be quoted')
    return text


def _pattern(text: str) -> str:
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise ValueError(f"{text!r} is not a valid regular expression: {error}") from error
    if groups != 1:
        raise ValueError(
            f"{text!r} has {groups} capturing groups; exactly one is needed, for the answer; write others as (?:...)"
        )
    return text


def _one_way(answer: "AnswerConfig") -> "Iterator[Rule[AnswerConfig]]":
    ways = {"after": answer.after is not None, "regex": answer.regex is not None, "boxed": answer.boxed}
    given = " and ".join(key for key, there in ways.items() if there)
    yield Rule(
        "one-of",
        "",
        sum(ways.values()) != 1,
        tuple(ways),
        'set one of after: "####" (in quotes), regex: ... or boxed: true',
        says=f"exactly one way to find an answer is needed; given: {given or 'none'}",
    )


class AnswerConfig(StrictModel):
    """Location of the answer within a text; exactly one key must be set."""

    after: Annotated[str, AfterValidator(_marker)] | None = None
    """A marker, such as `####` in GSM8K: the answer is the rest of its last line. Null if not used (ours)."""
    regex: Annotated[str, AfterValidator(_pattern)] | None = None
    """A Python regular expression with one group: the answer is the last match's group. Null if not used (ours)."""
    boxed: bool = False
    r"""Take the content of the last \boxed{...}, \fbox{...} or \framebox{...} as the answer, as in MATH (ours)."""

    rules = (_one_way,)

    def extract(self, text: str) -> str | None:
        """Return the answer in the text; None if there is none."""
        found = None
        if self.boxed:
            found = last_boxed(text)
        elif self.after is not None:
            _, marker, rest = text.rpartition(self.after)
            found = rest.strip().partition("\n")[0] if marker else None
        else:
            assert self.regex is not None
            for match in re.finditer(self.regex, text):
                found = match[1]
        return (found or "").strip() or None

    @property
    def lacking(self) -> str:
        """Return a message for a text without an answer."""
        if self.boxed:
            return r"has no closed \boxed{...} with an answer in it"
        if self.after is not None:
            return f"has no answer after {self.after!r}"
        return f"has no match of {self.regex!r} with an answer in it"


_BOX = re.compile(r"\\(?:boxed|fbox|framebox(?:\s*\[[^\[\]]*\]){0,2})\s*")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}, \fbox, \framebox or \boxed 5; None if missing or not closed."""
    start = None
    for box in _BOX.finditer(text):
        start = box.end()
    if start is None:
        return None
    if not text.startswith("{", start):
        token = re.compile(r"[^\s$\\{}]+").match(text, start)
        return token[0] if token else None
    depth = 0
    for brace in _BRACES.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start + 1 : brace.start()]
    return None


_ANSWER_IS = re.compile(r"answer(?:\s+is|\s*:)+", re.IGNORECASE)


def stated_answer(response: str) -> str:
    """Return a response's likely answer without a box: the text after #### or "answer is", else the whole response."""
    _, marker, stated = response.rpartition("####")
    if not marker:
        for match in _ANSWER_IS.finditer(response):
            marker, stated = match[0], response[match.end() :]
    if not marker:
        return response
    return stated.strip().partition("\n")[0]


PROCESS_START_S = 300.0
"""Deadline, in seconds, for an environment process to start."""


RETRIES = 2
"""Further attempts to score an answer without a reply, or starts of an agent, before an episode is dropped."""


class EnvPoolConfig(StrictModel):
    """The processes of each environment; a failing process affects at most its own episodes (ours)."""

    size: NonNegativeInt | None = None
    """Number of processes of each environment; 0 uses the driver; null means 1 for env.math, env.rewards and
    env.custom, else 0."""
    timeout_s: Seconds = 120.0
    """Seconds allowed for scoring up to 8 answers in one call; a slower process is killed and replaced."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs that Ray reserves for each process, for example for a reward model, in addition to the ranks' and engines'
    GPUs: a fraction of one GPU, or whole GPUs; 0 hides all GPUs."""
    max_drop_rate: Fraction = 0.0
    """Maximum share of an environment's episodes dropped in a step or a validation batch; above it the run ends."""
    variables: StrTuple = ()
    """Names of the driver's environment variables to pass to the processes besides those passed to ranks, such as a
    service's key; the values reach neither Ray nor a log."""


OWN_TOOL_PARSERS = ("hermes", "nemotron_json", "none")
"""Values of tool_parser that need no additional package."""


class EndpointConfig(StrictModel):
    """Agents that play the episodes and call the policy over HTTP through OpenAI's API (ours).

    Each is a command, run once per sample, or an agent of env.nemo_gym. The command receives OPENAI_BASE_URL,
    OPENAI_API_KEY and NEMO_RL_SESSION_URL as environment variables, and the data row as JSON on standard input. It ends
    the session with a reward, or exits with 0 to have the recipe's environment score the last answer. See
    docs/environments.md.
    """

    command: StrTuple = ()
    """The program and its arguments, run without a shell. With env.nemo_gym: the interpreter of the Python environment
    in which the package nemo-gym is installed, by default python."""
    processes: PositiveInt = 8
    """Number of commands that run at a time. NeMo Gym plays all samples at once: 1 runs its servers in one process,
    which suits servers that use no Ray tasks; more starts Ray and builds an environment for each server."""
    timeout_s: Seconds = 600.0
    """Seconds allowed for an agent from its start to the end of its session; a late agent is killed, and restarted up
    to 2 times."""
    tool_parser: str = "hermes"
    """Format of tool calls in an answer: hermes (also Qwen's), JSON between <tool_call> and </tool_call>;
    nemotron_json, a JSON list between <TOOLCALL> and </TOOLCALL>; none, no tool calls; any other name, a parser in the
    renderers library (extra tool-parsers)."""
