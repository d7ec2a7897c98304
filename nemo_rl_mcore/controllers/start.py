"""From a checked recipe to the rollouts of an asynchronous run."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_mcore.algorithms.rollout import Responder
from nemo_rl_mcore.config import GRPOMasterConfig
from nemo_rl_mcore.controllers.async_grpo import GroupDraw
from nemo_rl_mcore.controllers.event_log import EventLog, read_events
from nemo_rl_mcore.controllers.events import Started
from nemo_rl_mcore.controllers.group_store import GroupStore
from nemo_rl_mcore.controllers.ledger import Ledger
from nemo_rl_mcore.controllers.rollouts import Retention, Rollouts
from nemo_rl_mcore.controllers.states import Limits
from nemo_rl_mcore.data.datasets import PromptSource
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.interfaces import RolloutEngines
from nemo_rl_mcore.preflight.saved_run import RECIPE_FILE, recipe_text

EVENTS_FILE = "rollouts.jsonl"
KEPT_GROUPS = "groups"
"""Folder of the groups that a replay trains on, one of each step in it."""


@contextmanager
def open_rollouts(
    config: GRPOMasterConfig,
    engines: RolloutEngines,
    prompts: PromptSource,
    tokenizer: Tokenizer,
    resumed_step: int | None,
) -> Generator[Rollouts]:
    """The rollouts of a run that goes on after `resumed_step`; its events are logged in the folder of its metrics."""
    grpo = config.grpo
    limits = Limits(
        groups_per_step=grpo.num_prompts_per_step,
        max_age=grpo.async_grpo.max_trajectory_age_steps,
        last_step=grpo.max_num_steps,
        max_attempts=grpo.async_grpo.max_generation_failures + 1,
    )
    responder = Responder(engines, tokenizer, config.max_prompt_length)
    draw = GroupDraw(prompts, responder, grpo.num_prompts_per_step, grpo.num_generations_per_prompt)
    folder = Path(config.logger.log_dir)
    (folder / RECIPE_FILE).write_text(recipe_text(config), encoding="utf-8")  # for a replay
    with EventLog(folder / EVENTS_FILE) as log:
        ledger = Ledger(
            limits, log.append, version=resumed_step or 0, incarnation=_incarnation(folder / EVENTS_FILE)
        )
        retention = Retention(
            until_checkpoint=config.checkpointing.enabled,
            archive=folder / KEPT_GROUPS if config.keeps_groups else None,
        )
        with Rollouts(grpo.async_grpo, ledger, GroupStore(), engines, draw, retention) as rollouts:
            yield rollouts


def _incarnation(log: Path) -> int:
    """One that no earlier start of the run has had."""
    if not log.exists():
        return 0
    try:
        return sum(isinstance(event, Started) for event in read_events(log))
    except ValueError as error:
        raise RunStoppedError(f"logger.log_dir: {error}; name another folder, or remove the file") from error
