"""Which tasks and environments take several turns, and which answer once."""

from collections.abc import Iterator

from nemo_rl_mcore.config.algorithm import EpisodesConfig
from nemo_rl_mcore.config.base import Problem, has_no_effect
from nemo_rl_mcore.config.data import TURN_TASKS
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.recipe.rules.feature import Rules


def _environment(config: RunConfig) -> Iterator[Problem]:
    """Yield an embedded task of several turns without its environment, and such an environment without its task."""
    task, given = config.data.dataset_name, next(iter(config.env.given), None)
    if task in TURN_TASKS and given not in (task, "custom"):
        yield Problem(
            "missing",
            f"env.{task}",
            f"missing with data.dataset_name: {task}",
            f"set it to {{}}{f', and env.{given} to null' if given else ''}",
            ("data.dataset_name", *([f"env.{given}"] if given else [])),
        )
    if given in TURN_TASKS and task != given:
        yield Problem(
            "incompatible",
            f"env.{given}",
            f"knows the prompts of data.dataset_name: {given} alone, which is {task}",
            f"set it to null, or data.dataset_name: {given}",
            ("data.dataset_name",),
        )


def _turns(config: RunConfig) -> Iterator[Problem]:
    """Yield environments of several turns where there is one, and several turns of an environment that scores."""
    loop, task, given = config.loop, config.data.dataset_name, next(iter(config.env.given), "arithmetic")
    if not isinstance(loop, EpisodesConfig):
        if task in TURN_TASKS:
            yield Problem(
                "incompatible",
                "data.dataset_name",
                f"{task} has several turns, and {config.algorithm} takes one answer to a prompt",
                "name another task, or run grpo or ppo",
            )
        return
    key = f"{config.algorithm}.max_rollout_turns"
    if given in TURN_TASKS and loop.max_rollout_turns == 1:
        yield Problem(
            "too-small",
            key,
            f"1 ends every episode of env.{given} with its first answer",
            "raise it",
            (f"env.{given}",),
        )
    if config.scores_one_answer and loop.max_rollout_turns > 1:
        because = f"with env.{given}, which scores the first answer and ends the episode"
        yield has_no_effect(key, loop.max_rollout_turns, because, f"env.{given}")


RULES = Rules(of_runs=(_environment, _turns))
