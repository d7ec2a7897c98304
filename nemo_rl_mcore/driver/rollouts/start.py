"""Open the scheduler of a checked recipe, including groups saved in the checkpoint that the run resumes from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nemo_rl_mcore.config import RolloutConfig, RunConfig
from nemo_rl_mcore.config.run_config import KEPT_BYTES
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import PromptSource
from nemo_rl_mcore.driver.checkpoints import ROLLOUTS_FOLDER, Checkpoint, free_name
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.rollouts.asynchronous import AsynchronousScheduler
from nemo_rl_mcore.driver.rollouts.events import (
    BEGINNING,
    EVENTS_FILE,
    Committed,
    LogMark,
    RunLog,
    Started,
    Token,
    set_aside_after,
)
from nemo_rl_mcore.driver.rollouts.ledger import Ledger, Limits, SavedLedger
from nemo_rl_mcore.driver.rollouts.player import GenerationInterface, RolloutCollector
from nemo_rl_mcore.driver.rollouts.saved import GroupArchive, SavedRollouts, digest_of_group, versions_of
from nemo_rl_mcore.driver.rollouts.scheduler import Draw, DrawnGroups, Scheduler, SynchronousScheduler
from nemo_rl_mcore.driver.rollouts.transcript import dropped_rows
from nemo_rl_mcore.driver.run_folder import changes_of_answers, read_recipe_of
from nemo_rl_mcore.errors import RunStoppedError, code_of, folder_error

if TYPE_CHECKING:
    from nemo_rl_mcore.driver.actors.engine_generation import EngineGeneration

KEPT_GROUPS = "groups"
"""Folder that keeps groups for a replay, with one subfolder per step."""

MOST_ROUNDS = 10
"""Number of generation rounds after which a dynamic sampling step gives up."""


@contextmanager
def open_rollouts(
    config: RunConfig,
    engine: GenerationInterface,
    prompts: PromptSource,
    collector: RolloutCollector,
    step: int,
    saved: SavedRollouts | None,
    extra_parts: MutableMapping[str, Callable[[Path], None]],
) -> Generator[Scheduler[Any]]:
    """Open the scheduler of a run that continues after `step`; events are logged in the folder of the run's metrics.

    engine: an `EngineGeneration` for asynchronous rollouts. saved: result of `read_saved`. extra_parts: writers of a
    checkpoint's further parts, by folder name; this function adds a writer for the rollouts.
    """
    limits, folder, groups = limits_of(config), Path(config.logger.log_dir), dict[int, BatchedDataDict]()
    draw = draw_of(config, prompts, collector)
    goes_on = set_aside(folder, step, saved and saved.log)
    with RunLog(folder) as log:
        if saved is None:
            starts = sum(isinstance(event, Started) for event in log.before)
            ledger = Ledger(limits, log.append, version=step, incarnation=starts)
        else:
            saved = without_strangers(saved, draw)
            ledger = Ledger.from_json(saved.ledger.model_dump(), limits, log.append)
            groups |= saved.ready
            attempts = {group.position: group.attempt for group in saved.ledger.groups}
            for position, group in () if goes_on else saved.ready.items():
                # If the log lacks the earlier events, log the saved groups again.
                token = Token(saved.ledger.incarnation, position, attempts[position])
                segments = tuple(versions_of(group, saved.ledger.version))
                log.append(Committed(token=token, segments=segments, digest=digest_of_group(group)))
        if step and config.asynchronous:
            kept = f"the answers to {len(groups)} prompts are kept" if groups else "no answers were kept"
            write_line(sys.stdout, f"prompts are answered from number {ledger.next_position} on: {kept}")
        with scheduler_of(config, ledger, groups, engine, draw) as scheduler:
            extra_parts[ROLLOUTS_FOLDER] = lambda folder: scheduler.saved(log.mark).save(folder)
            yield scheduler


def draw_of(config: RunConfig, prompts: PromptSource, collector: RolloutCollector) -> Draw:
    section = config.loop if isinstance(config.loop, RolloutConfig) else None
    return Draw(prompts, collector, config.prompts_per_step, config.generations_per_prompt, section)


def scheduler_of(
    config: RunConfig,
    ledger: Ledger,
    groups: dict[int, BatchedDataDict],
    engine: GenerationInterface,
    draw: Draw,
) -> Scheduler[Any]:
    archive, most_unused, loop, per_round = None, None, config.loop, groups_per_round(config)
    if config.asynchronous:
        folder, checkpoints = Path(config.logger.log_dir) / KEPT_GROUPS, config.checkpointing.enabled
        archive = GroupArchive(folder, KEPT_BYTES, checkpoints=checkpoints, step=ledger.version)
    if isinstance(loop, RolloutConfig) and loop.use_dynamic_sampling:
        most_unused = MOST_ROUNDS * per_round - loop.num_prompts_per_step
    redoes_steps = config.checkpointing.enabled and config.cluster.max_trainer_restarts > 0
    rest = draw, redoes_steps, archive, most_unused
    if not config.asynchronous:
        return SynchronousScheduler(ledger, groups, engine, *rest, groups_per_round=per_round)
    engines = cast("EngineGeneration", engine)
    section, key = config.asynchrony, config.key("asynchrony")
    return AsynchronousScheduler(ledger, groups, engines, *rest, section=section, key=key)


def groups_per_round(config: RunConfig) -> int:
    loop = config.loop
    if config.asynchronous or not isinstance(loop, RolloutConfig) or not loop.use_dynamic_sampling:
        return config.prompts_per_step
    return max(1, round(loop.num_prompts_per_step * loop.batch_multiplier))


def limits_of(config: RunConfig) -> Limits:
    loop = config.loop
    in_rounds = isinstance(loop, RolloutConfig) and loop.use_dynamic_sampling and not config.asynchronous
    return Limits(
        groups_per_step=config.prompts_per_step,
        max_age=config.max_age,
        last_step=config.loop.max_num_steps,
        max_attempts=config.asynchrony.max_generation_failures + 1,
        groups_key=config.prompts_key,
        age_key=f"{config.key('asynchrony')}.max_trajectory_age_steps",
        order=config.asynchrony.order,
        spare=groups_per_round(config) - 1 if in_rounds else 0,
    )


def read_saved(config: RunConfig, start: Checkpoint | None) -> SavedRollouts | None:
    """Return a checkpoint's rollouts for a run that resumes from it; None if it has none that the run can use.

    Saved rollouts are ignored if the run does not sample, or if its step size differs and no groups were saved. Saved
    answers that the run would not have sampled itself are discarded, which is printed. Raises RunStoppedError for
    damage, naming the file, and for rollouts from which the run cannot resume.
    """
    if start is None or not config.generations_per_prompt:
        return None
    folder, limits = start.folder / ROLLOUTS_FOLDER, limits_of(config)
    if not folder.is_dir():
        return None
    try:
        saved = SavedRollouts.load(folder, start.step)
        changes = changes_of_answers(read_recipe_of(start.folder), config)
        if saved.ledger.groups_per_step != limits.groups_per_step and not saved.ledger.groups:
            return None
        if changes:
            saved = saved.answered_again(saved.ready, ", ".join(map(str, changes)))
        if not config.asynchronous:
            saved = saved.answered_again(saved.ready, "each step answers its own")
        SavedLedger.parse(saved.ledger.model_dump(), limits)
    except ValueError as error:
        raise RunStoppedError(f"checkpointing.resume: {error}", code=code_of(error)) from error
    return saved


def without_strangers(saved: SavedRollouts, draw: Draw) -> SavedRollouts:
    """Discard answers that are not fully scored, or that do not match the run's prompts and numbers of answers."""
    drawn, strangers = DrawnGroups(draw), list[int]()
    for position, group in saved.ready.items():
        same_prompts = draw.collector.is_answer_to(drawn[position].asked, group)
        # A dropped episode may get a reply when it is played again.
        if not same_prompts or "rewards" not in group or bool(dropped_rows(group).any()):
            strangers.append(position)
    return saved.answered_again(
        strangers, "they are not the run's prompts, not as many answers to them, or not scored"
    )


def set_aside(folder: Path, step: int, mark: LogMark | None) -> bool:
    """Set aside a folder's data from after a step: move later events to another file and rename later groups' folders.

    mark: the log's end at the step's checkpoint; None if the checkpoint has no mark, in which case the log stays whole.
    Returns True if the log continues from the mark. Raises FolderError.
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
