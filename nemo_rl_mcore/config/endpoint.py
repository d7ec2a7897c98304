"""Configuration of the endpoint by which agents call the policy."""

from nemo_rl_mcore.config.base import NonNegativeInt, PositiveInt, Seconds, StrictModel, StrTuple

OWN_TOOL_PARSERS = ("hermes", "none")
"""Names of tool_parser that need no package."""


class GymConfig(StrictModel):
    """How the servers of env.nemo_gym run (ours)."""

    python: str = "python"
    """The interpreter of the environment in which the package nemo-gym is installed."""
    one_process: bool = False
    """Run all servers in one process, for those that make no tasks of Ray; false has NeMo Gym start Ray, and build an
    environment for each of them."""
    start_timeout_s: Seconds = 1800.0
    """Deadline of the servers' start, in which NeMo Gym may install packages."""


class EndpointConfig(StrictModel):
    """Agents play the episodes and call the policy over HTTP as a model of OpenAI's API (ours).

    They are a command, run for each sample, or those of env.nemo_gym. The command finds OPENAI_BASE_URL, OPENAI_API_KEY
    and NEMO_RL_SESSION_URL in its environment, and the row of the data set, as JSON, on its standard input. It ends the
    session with a reward, or exits with 0 and has the environment of the recipe score the last answer. See
    docs/endpoint.md.
    """

    command: StrTuple = ()
    """The program and its arguments; no shell reads them. With env.nemo_gym there is none."""
    processes: PositiveInt = 8
    """Commands that run at once; NeMo Gym plays all samples at once."""
    gym: GymConfig = GymConfig()
    """Read with env.nemo_gym."""
    timeout_s: Seconds = 600.0
    """Deadline of an agent, from its start to the end of its session; one that passes it is killed, and started again
    as often as env.pool.retries allows."""
    max_session_tokens: PositiveInt | None = None
    """Tokens of all answers to a session, after which it may not call the model again; null is no such bound."""
    tool_parser: str = "hermes"
    """How calls of tools stand in an answer: hermes, also that of Qwen, as JSON between <tool_call> and </tool_call>;
    none reads no calls; any other name is one of the library renderers, of the extra tool-parsers."""
    port: NonNegativeInt = 0
    """Port of the endpoint on the loopback interface; 0 takes a free one."""
