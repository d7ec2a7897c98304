"""What does not go with agents that play the episodes."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.data import TURN_TASKS
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.recipe.rules.feature import Rules

_KEY = "env.endpoint"
_REFUSED = {
    "ppo": "a session may fork into several rows, and a critic cannot say of one what the next one is worth",
    "dpo": "a pair compares two rows, and a session may fork into several",
    "sft": "nothing is sampled",
    "distillation": "the student answers a prompt once",
}


def _algorithm(config: RunConfig) -> Iterator[Problem]:
    """Yield an algorithm that cannot train on sessions."""
    if config.env.endpoint is not None and (why := _REFUSED.get(config.algorithm)) is not None:
        yield Problem(
            "incompatible", _KEY, f"does not go with {config.algorithm}: {why}", "run grpo, or set it to null"
        )


def _task(config: RunConfig) -> Iterator[Problem]:
    """Yield an environment of several turns, whose part the agent has."""
    given = next(iter(config.env.given), None)
    if config.env.endpoint is not None and given in TURN_TASKS:
        yield Problem(
            "incompatible",
            f"env.{given}",
            f"plays the episodes, and so do the agents of {_KEY}",
            "set one of them to null",
            (_KEY,),
        )


def _stall(config: RunConfig) -> Iterator[Problem]:
    """Yield a stall that is told before an agent is given up."""
    endpoint = config.env.endpoint
    if endpoint is None or not config.asynchronous:
        return
    stall, longest = config.asynchrony.stall_timeout_s, endpoint.timeout_s * (config.env.pool.retries + 1)
    if stall is not None and stall <= longest:
        yield Problem(
            "too-small",
            f"{config.asynchrony_key}.stall_timeout_s",
            f"{stall:g} is over before an agent is given up, after {longest:g} ({_KEY}.timeout_s: "
            f"{endpoint.timeout_s:g}, and env.pool.retries: {config.env.pool.retries} times more)",
            f"set it above {longest:g}, or lower the other two",
            (f"{_KEY}.timeout_s", "env.pool.retries"),
        )


RULES = Rules(of_runs=(_algorithm, _task, _stall))
