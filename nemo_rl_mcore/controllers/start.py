"""From a checked recipe to the rollouts of an asynchronous run."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from nemo_rl_mcore.algorithms.rollout import Responder
from nemo_rl_mcore.config import GRPOMasterConfig
from nemo_rl_mcore.controllers.async_grpo import GroupDraw
from nemo_rl_mcore.controllers.event_log import EventLog, read_events
from nemo_rl_mcore.controllers.events import Event, Finished, Started
from nemo_rl_mcore.controllers.group_store import GroupStore
from nemo_rl_mcore.controllers.ledger import Ledger
from nemo_rl_mcore.controllers.rollouts import Retention, Rollouts
from nemo_rl_mcore.controllers.saved_ledger import SavedDrop, SavedLedger
from nemo_rl_mcore.controllers.states import Limits
from nemo_rl_mcore.controllers.timeline import Timeline
from nemo_rl_mcore.data.datasets import PromptSource
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.errors import FolderError, RunStoppedError, folder_error
from nemo_rl_mcore.interfaces import RolloutEngines
from nemo_rl_mcore.output import write_line
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
    with RunLog(folder, recipe_text(config)) as log:
        ledger = resumed_ledger(limits, log, resumed_step or 0)
        if resumed_step:
            write_line(
                sys.stdout, f"prompts are answered from number {ledger.cursor} on: no answers were kept"
            )
        retention = Retention(
            until_checkpoint=config.checkpointing.enabled,
            archive=folder / KEPT_GROUPS if config.keeps_groups else None,
        )
        with Rollouts(grpo.async_grpo, ledger, GroupStore(), engines, draw, retention) as rollouts:
            yield rollouts


class RunLog:
    """The events of a run in its folder, beside its recipe; failures are FolderErrors. A context manager.

    before: the events of earlier starts. That the optimizer has stepped is never refused: the step is recorded first,
    and the event after it raises.
    """

    def __init__(self, folder: Path, recipe: str) -> None:
        self._folder = folder
        self._failure: FolderError | None = None
        path = folder / EVENTS_FILE
        try:
            (folder / RECIPE_FILE).write_text(recipe, encoding="utf-8")  # for a replay
            self.before = read_events(path) if path.exists() else []
            self._log = EventLog(path)
        except OSError as error:
            raise folder_error("logger.log_dir", folder, error) from error
        except ValueError as error:
            raise RunStoppedError(
                f"logger.log_dir: {error}; name another folder, or remove the file"
            ) from error

    def append(self, event: Event) -> None:
        """Write an event; raises FolderError, also for one before it that could not be written."""
        if self._failure is not None:
            raise self._failure
        try:
            self._log.append(event)
        except OSError as error:
            self._failure = folder_error("logger.log_dir", self._folder, error)
            if not isinstance(event, Finished):
                raise self._failure from error

    def __enter__(self) -> Self:
        """Return the log."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self._log.close()


def resumed_ledger(limits: Limits, log: RunLog, version: int) -> Ledger:
    """The ledger of a run that goes on after a step: behind all groups that were trained up to it.

    Where some were dropped before, the log says which; those that were not trained are generated again.
    """
    incarnation = sum(isinstance(event, Started) for event in log.before)
    timeline = Timeline.of(log.before)
    steps = range(1, version + 1)
    trained = set(timeline.positions(steps)) if all(step in timeline.chunks for step in steps) else set[int]()
    cursor = max(trained, default=-1) + 1
    if cursor <= version * limits.groups_per_step:
        return Ledger(limits, log.append, version=version, incarnation=incarnation)
    dropped = [SavedDrop(position=p, reason="before a resume") for p in range(cursor) if p not in trained]
    saved = SavedLedger(
        groups_per_step=limits.groups_per_step,
        incarnation=incarnation - 1,
        version=version,
        cursor=cursor,
        dropped=dropped,
        groups=[],
    )
    return Ledger.from_json(saved.model_dump(), limits, log.append, incarnation=incarnation)
