"""From a checked recipe to the rollouts of an asynchronous run."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_mcore.algorithms.rollout import Responder
from nemo_rl_mcore.config import GRPOMasterConfig
from nemo_rl_mcore.controllers.async_grpo import GroupDraw
from nemo_rl_mcore.controllers.event_log import EventLog
from nemo_rl_mcore.controllers.group_store import GroupStore
from nemo_rl_mcore.controllers.ledger import Ledger
from nemo_rl_mcore.controllers.rollouts import Rollouts
from nemo_rl_mcore.controllers.states import Limits
from nemo_rl_mcore.data.datasets import PromptSource
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.interfaces import RolloutEngines

EVENTS_FILE = "rollouts.jsonl"


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
    with EventLog(Path(config.logger.log_dir) / EVENTS_FILE) as log:
        ledger = Ledger(limits, log.append, version=resumed_step or 0)
        with Rollouts(grpo.async_grpo, ledger, GroupStore(), engines, draw) as rollouts:
            yield rollouts
