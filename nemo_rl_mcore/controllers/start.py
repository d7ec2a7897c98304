"""From a checked recipe to the rollouts of an asynchronous run."""

from __future__ import annotations

import sys
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from nemo_rl_mcore.algorithms.episode_rows import dropped_rows
from nemo_rl_mcore.algorithms.episodes import sampled_versions
from nemo_rl_mcore.algorithms.rollout import RolloutCollector
from nemo_rl_mcore.algorithms.run_checkpoints import RunCheckpoints
from nemo_rl_mcore.config import GRPOMasterConfig, RunConfig
from nemo_rl_mcore.controllers.draw import Draw, DrawnGroup, GroupDraw
from nemo_rl_mcore.controllers.event_log import (
    BEGINNING,
    EVENTS_FILE,
    EventLog,
    LogMark,
    read_events,
    set_aside_after,
)
from nemo_rl_mcore.controllers.events import Committed, Event, Finished, Started, Token
from nemo_rl_mcore.controllers.group_store import GroupStore, Retention, digest_of_group, segments_of
from nemo_rl_mcore.controllers.ledger import Ledger
from nemo_rl_mcore.controllers.logged_turns import turns_of
from nemo_rl_mcore.controllers.rollouts import Rollouts
from nemo_rl_mcore.controllers.saved_ledger import SavedDrop, SavedLedger
from nemo_rl_mcore.controllers.saved_rollouts import SavedRollouts
from nemo_rl_mcore.controllers.states import Limits
from nemo_rl_mcore.controllers.timeline import Timeline
from nemo_rl_mcore.data.datasets import PromptSource
from nemo_rl_mcore.errors import FolderError, RunStoppedError, code_of, folder_error
from nemo_rl_mcore.interfaces import RolloutEngines
from nemo_rl_mcore.output import write_line
from nemo_rl_mcore.preflight.saved_run import (
    changes_of_answers,
    read_recipe_of,
)
from nemo_rl_mcore.training.checkpoints import ROLLOUTS_FOLDER, Checkpoint, free_name

KEPT_GROUPS = "groups"
"""Folder of the groups that a replay trains on, one of each step in it."""


@contextmanager
def open_rollouts(
    config: GRPOMasterConfig,
    engines: RolloutEngines,
    prompts: PromptSource,
    collector: RolloutCollector,
    checkpoints: RunCheckpoints,
    saved: SavedRollouts | None,
) -> Generator[Rollouts]:
    """The rollouts of a run that goes on where its checkpoints say; its events are logged in the folder of its metrics.

    collector: asks the engines. saved: what `read_saved` gave. Each checkpoint from now on holds the rollouts, too.
    """
    grpo, limits, step = config.grpo, _limits(config), checkpoints.resumed_step or 0
    draw = GroupDraw(prompts, collector, grpo.num_prompts_per_step, grpo.num_generations_per_prompt)
    folder = Path(config.logger.log_dir)
    goes_on, groups = set_aside(folder, step, saved and saved.log), GroupStore()
    with RunLog(folder) as log:
        if saved is None:
            ledger = resumed_ledger(limits, log, step)
        else:
            ledger = restored_ledger(limits, log, without_strangers(saved, draw), groups, goes_on=goes_on)
        if step:
            _tell_where_answers_begin(ledger, len(groups))
        retention = Retention(
            until_checkpoint=config.redoes_steps,
            archive=folder / KEPT_GROUPS if config.keeps_groups else None,
        )
        with Rollouts(grpo.async_grpo, ledger, groups, engines, draw, retention) as rollouts:
            checkpoints.beside[ROLLOUTS_FOLDER] = lambda folder: rollouts.saved(log.mark).save(folder)
            yield rollouts


def _limits(config: GRPOMasterConfig) -> Limits:
    grpo = config.grpo
    return Limits(
        groups_per_step=grpo.num_prompts_per_step,
        max_age=grpo.async_grpo.max_trajectory_age_steps,
        last_step=grpo.max_num_steps,
        max_attempts=grpo.async_grpo.max_generation_failures + 1,
    )


def _tell_where_answers_begin(ledger: Ledger, kept: int) -> None:
    answers = f"the answers to {kept} prompts are kept" if kept else "no answers were kept"
    write_line(sys.stdout, f"prompts are answered from number {ledger.next_position} on: {answers}")


class RunLog:
    """The events of a run in its folder; failures are FolderErrors. A context manager.

    before: the events of earlier starts. That the optimizer has stepped is never refused: the step is recorded first,
    and the event after it raises.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._failure: FolderError | None = None
        path = folder / EVENTS_FILE
        try:
            self.before = read_events(path) if path.exists() else []
            self._log = EventLog(path)
        except OSError as error:
            raise folder_error("logger.log_dir", folder, error) from error
        except ValueError as error:
            raise RunStoppedError(
                f"logger.log_dir: {error}; name another folder, or remove the file", code=code_of(error)
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

    def mark(self) -> LogMark:
        """See `EventLog.mark`."""
        return self._log.mark()

    def __enter__(self) -> Self:
        """Return the log."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self._log.close()


def read_saved(config: RunConfig, start: Checkpoint | None) -> SavedRollouts | None:
    """What a checkpoint holds of the rollouts, for a run that goes on from it; None for one that holds none of it.

    That is a checkpoint of a synchronous run or of an earlier version. Groups that are none of the run any more, since
    it draws answers in another way or takes no such old ones, are to be answered again, which is told. Raises
    RunStoppedError for damage, naming the file, and for what the run cannot go on with.
    """
    if start is None or not (isinstance(config, GRPOMasterConfig) and config.asynchronous):
        return None
    folder, limits = start.folder / ROLLOUTS_FOLDER, _limits(config)
    if not folder.is_dir():
        return None
    try:
        saved = SavedRollouts.load(folder, start.step)
        changes = changes_of_answers(read_recipe_of(start.folder), config)
        saved = _answered_again(saved, saved.ready if changes else (), ", ".join(map(str, changes)))
        SavedLedger.parse(saved.ledger.model_dump(), limits.groups_per_step, limits.max_age)
    except ValueError as error:
        raise RunStoppedError(f"checkpointing.resume: {error}", code=code_of(error)) from error
    return saved


def without_strangers(saved: SavedRollouts, draw: Draw) -> SavedRollouts:
    """What is left without groups whose prompts, or numbers of answers, are not those of the run, or are not scored."""
    of_steps: dict[int, Sequence[DrawnGroup]] = {}
    strangers: list[int] = []
    for position, group in saved.ready.items():
        step, place = divmod(position, saved.ledger.groups_per_step)
        if step not in of_steps:
            of_steps[step] = draw.groups_of(step + 1)
        asked = of_steps[step][place].asked["input_ids"]
        same_prompts = torch.equal(group["input_ids"][:, : asked.shape[1]], asked)
        # What an environment did not reply to may be replied to now.
        if not same_prompts or "rewards" not in group or bool(dropped_rows(group).any()):
            strangers.append(position)
    return _answered_again(
        saved, strangers, "they are not the run's prompts, not as many answers to them, or not scored"
    )


def _answered_again(saved: SavedRollouts, positions: Collection[int], why: str) -> SavedRollouts:
    if positions:
        write_line(sys.stdout, f"{len(positions)} prompts are answered again: {why}")
    return saved.without(positions)


def set_aside(folder: Path, step: int, mark: LogMark | None) -> bool:
    """Move what a folder holds of groups behind a step: events into a file of their own, kept groups to another name.

    mark: where the log stood at the checkpoint of the step; None for one that does not know it, whose log stays whole.
    Returns whether the log goes on from there. Raises FolderError.
    """
    try:
        for kept in [*(folder / KEPT_GROUPS).glob("step_*")]:
            number = kept.name.removeprefix("step_")
            if number.isdecimal() and int(number) > step:
                kept.rename(free_name(kept.with_name(f"aside_{kept.name}")))
        mark = mark if step else BEGINNING
        return mark is None or set_aside_after(folder / EVENTS_FILE, mark)
    except OSError as error:
        raise folder_error("logger.log_dir", folder, error) from error


def restored_ledger(
    limits: Limits, log: RunLog, saved: SavedRollouts, groups: GroupStore, *, goes_on: bool
) -> Ledger:
    """The ledger of a checkpoint, whose ready groups are put into `groups`.

    goes_on: whether the log has what came before; in one that has not, it is told anew how the groups were drawn.
    """
    ledger = Ledger.from_json(saved.ledger.model_dump(), limits, log.append)
    attempts = {group.position: group.attempt for group in saved.ledger.groups}
    for position, group in saved.ready.items():
        groups.put(position, group)
        if not goes_on:
            token = Token(saved.ledger.incarnation, position, attempts[position])
            segments = tuple(segments_of(sampled_versions(group)))
            log.append(
                Committed(
                    token=token, segments=segments, digest=digest_of_group(group), turns=turns_of(group)
                )
            )
    return ledger


def resumed_ledger(limits: Limits, log: RunLog, version: int) -> Ledger:
    """The ledger of a run that goes on after a step without a saved one: behind all groups that were trained up to it.

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
