"""The program of the agents, looked for before ranks start."""

import shutil
from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.master import RunConfig


def agent_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a program that this machine does not have."""
    endpoint = config.env.endpoint
    if endpoint is not None and shutil.which(endpoint.command[0]) is None:
        yield Problem(
            "not-found",
            "env.endpoint.command",
            f"{endpoint.command[0]!r} is no program that is found on PATH or by its path",
            "correct it, or make the file executable",
        )
