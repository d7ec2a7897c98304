"""Configuration of the endpoint by which agents call the policy."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import NonNegativeInt, PositiveInt, Problem, Seconds, StrictModel, StrTuple

OWN_TOOL_PARSERS = ("hermes", "none")
"""Names of tool_parser that need no package."""


class EndpointConfig(StrictModel):
    """Agents play the episodes: a command for each, which calls the policy over HTTP as a model of OpenAI's API (ours).

    The command finds OPENAI_BASE_URL, OPENAI_API_KEY and NEMO_RL_SESSION_URL in its environment, and the row of the
    data set, as JSON, on its standard input. It ends the session with a reward, or exits with 0 and has the environment
    of the recipe score the last answer. See docs/endpoint.md.
    """

    command: StrTuple
    """The program and its arguments; no shell reads them."""
    processes: PositiveInt = 8
    """Agents that run at once."""
    timeout_s: Seconds = 600.0
    """Deadline of an agent, from its start to the end of its session; one that passes it is killed, and started again
    as often as env.pool.retries allows."""
    max_session_tokens: PositiveInt | None = None
    """Tokens of all answers to a session, behind which it may not call the model again; null is no such bound."""
    tool_parser: str = "hermes"
    """How calls of tools stand in an answer: hermes, also that of Qwen, as JSON between <tool_call> and </tool_call>;
    none reads no calls; any other name is one of the library renderers, of the extra tool-parsers."""
    port: NonNegativeInt = 0
    """Port of the endpoint on the loopback interface; 0 takes a free one."""

    def problems(self) -> Iterator[Problem]:
        """Yield a command without a program."""
        if not self.command or not self.command[0]:
            yield Problem("missing", "command", "names no program", "write [program, argument, ...]")
