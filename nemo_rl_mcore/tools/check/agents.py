"""The program of the agents, or the interpreter of NeMo Gym, looked for before ranks start."""

import shutil
import subprocess
from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.run_config import RunConfig

_LOOKS_WITHIN_S = 30.0


def agent_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a program that this machine does not have, or an interpreter without NeMo Gym."""
    endpoint = config.env.endpoint
    if endpoint is None:
        return
    gym = config.env.nemo_gym is not None
    key, program = ("gym.python", endpoint.gym.python) if gym else ("command", endpoint.command[0])
    if shutil.which(program) is None:
        yield Problem(
            "not-found",
            f"env.endpoint.{key}",
            f"{program!r} is no program that is found on PATH or by its path",
            "correct it, or make the file executable",
        )
    elif gym and not _has_gym(program):
        yield Problem(
            "not-installed",
            "env.endpoint.gym.python",
            f"{program!r} has no package nemo_gym",
            "install nemo-gym in an environment of its own, and name the interpreter of that",
        )


def _has_gym(python: str) -> bool:
    """Return whether an interpreter finds NeMo Gym, without importing it."""
    looks = "import importlib.util, sys; sys.exit(importlib.util.find_spec('nemo_gym') is None)"
    try:
        done = subprocess.run(
            (python, "-c", looks), capture_output=True, timeout=_LOOKS_WITHIN_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
