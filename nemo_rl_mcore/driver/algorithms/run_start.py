"""Find where a run begins, as the section `checkpointing` asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_rl_mcore.config import CheckpointingConfig, RunConfig
from nemo_rl_mcore.data.tokenizer import CHAR_TOKENIZER_NAME, Tokenizer
from nemo_rl_mcore.driver.algorithms.run_checkpoints import RunCheckpoints
from nemo_rl_mcore.driver.algorithms.skip_guard import SkipGuard
from nemo_rl_mcore.driver.saved_run import (
    Change,
    bounds_of,
    cannot_resume,
    changes_since,
    read_recipe_of,
    recipe_text,
)
from nemo_rl_mcore.errors import ChangedRunError, RunStoppedError, code_of
from nemo_rl_mcore.rank.checkpoints import (
    INFO_FILE,
    Checkpoint,
    CheckpointStore,
    NotACheckpointError,
    Retention,
    read_checkpoint,
    require_checkpoint,
)

Notify = Callable[[str], None]


def open_checkpoints(
    config: RunConfig,
    notify: Notify,
    tokenizer: Tokenizer | None = None,
    *,
    refuse_changes: bool = False,
    ended_by: Sequence[str] = (),
) -> RunCheckpoints:
    """Find where the run begins and prepare the folder for what it leaves; `notify` is called in whole lines.

    tokenizer: what a checkpoint is to hold if the recipe names a folder or a model of the hub. refuse_changes: raise
    ChangedRunError where `auto` would go on under another recipe, code or data, or has nothing left to do. ended_by:
    the paths of the keys that say which step is the last one.
    Raises RunStoppedError when the checkpoint to go on from, or to take weights from, is missing or of another model.
    """
    section = config.checkpointing
    for plan in config.models.values():
        if plan.policy.init_checkpoint is not None:
            require_whole(plan.policy.init_checkpoint, plan.key("policy.init_checkpoint"), section, notify)
    if not section.enabled:
        return RunCheckpoints()
    retention = Retention(section.keep_top_k, section.logged_metric, section.higher_is_better)
    store = CheckpointStore(Path(section.checkpoint_dir), retention, section.verify_checksums)
    start = _find_start(section, store, notify)
    built_in = config.policy.tokenizer.name == CHAR_TOKENIZER_NAME
    checkpoints = RunCheckpoints(
        store,
        section.save_period,
        config.loop.max_num_steps,
        recipe_text(config),
        start,
        section.resume,
        None if built_in else tokenizer,
        in_background=frozenset(name for name, plan in config.models.items() if plan.saved_in_background),
    )
    if start is not None:
        changes = _changes(start, config, refuse_changes=refuse_changes and section.resume == "auto")
        notify(_standing(start, config, changes, ended_by))
    if checkpoints.nothing_left:
        if store.root.is_dir():
            for leftover in store.remove_unfinished():
                notify(f"removed: {leftover}, which was not finished")
        return checkpoints
    for folder in store.begin_after(start.step if start is not None else 0):
        notify(f"set aside: {folder} ({_why_aside(folder, section)})")
    return checkpoints


def _why_aside(folder: Path, section: CheckpointingConfig) -> str:
    try:
        found = read_checkpoint(folder, verify_checksums=section.verify_checksums)
    except NotACheckpointError as error:
        return str(error)
    if not SkipGuard.accepts(found.counters):
        return f"the counters in {folder / INFO_FILE} are none of a run"
    return f"checkpointing.resume={section.resume} begins before it"


def require_whole(folder: str, key: str, section: CheckpointingConfig, notify: Notify) -> Checkpoint:
    """Return the checkpoint that a key names; `notify` is called when it has no checksums. Raises RunStoppedError."""
    try:
        found = require_checkpoint(Path(folder), key, verify_checksums=section.verify_checksums)
    except NotACheckpointError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error
    _report_without_checksums(found, section, notify)
    return found


def _find_start(section: CheckpointingConfig, store: CheckpointStore, notify: Notify) -> Checkpoint | None:
    if section.resume == "never":
        return None
    if section.resume not in ("auto", "must"):
        found = require_whole(section.resume, "checkpointing.resume", section, notify)
        if not SkipGuard.accepts(found.counters):
            raise RunStoppedError(
                f"checkpointing.resume: the counters in {found.folder / INFO_FILE} are none of a run",
                code="broken-counters",
            )
        return found
    latest = next((one for one in store.newest_first() if SkipGuard.accepts(one.counters)), None)
    if latest is None and section.resume == "must":
        raise RunStoppedError(
            f"checkpointing.resume: must, and {store.root} holds no checkpoint to go on from; set it to auto, or name "
            "the folder of the run",
            code="nothing-to-resume",
        )
    if latest is not None:
        _report_without_checksums(latest, section, notify)
    return latest


def _report_without_checksums(checkpoint: Checkpoint, section: CheckpointingConfig, notify: Notify) -> None:
    if section.verify_checksums and not checkpoint.has_checksums:
        notify(f"{checkpoint.folder} was saved without checksums: its files are not verified")


def _changes(start: Checkpoint, config: RunConfig, *, refuse_changes: bool) -> list[Change]:
    """Return what has changed; refuse a checkpoint of another algorithm, or whose state has no place in the models."""
    try:
        saved = read_recipe_of(start.folder)
    except ValueError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error
    if reason := cannot_resume(saved, config):
        raise RunStoppedError(f"checkpointing.resume: {start.folder} {reason}", code="other-run")
    changes = changes_since(saved, config)
    of_the_result = _of_the_result(changes, config)
    if refuse_changes and of_the_result:
        told = ", ".join(map(str, of_the_result))
        error = ChangedRunError(
            f"{start.folder} was saved before these changes: {told}; to go on with them, set checkpointing.resume (the "
            "argument resume) to must; to begin anew, set it to never, which puts aside what is there, or name another "
            "folder (out)",
            code="changed-run",
        )
        error.keys = tuple(change.path for change in of_the_result)
        raise error
    return changes


def _of_the_result(changes: Sequence[Change], config: RunConfig) -> list[Change]:
    return [change for change in changes if change.path not in bounds_of(config)]


def _standing(
    start: Checkpoint, config: RunConfig, changes: Sequence[Change], ended_by: Sequence[str]
) -> str:
    """Say where the run begins, or that nothing is left of it, and why."""
    if start.step < config.loop.max_num_steps:
        told, how = changes, "with changes"
        line = f"resuming after step {start.step} from {start.folder}"
    else:
        told, how = _of_the_result(changes, config), "without these changes"
        keys = " and ".join(ended_by or (f"{config.algorithm}.max_num_steps",))
        line = f"already finished after step {start.step}, saved in {start.folder} ({keys})"
    return line + (f", {how}: {', '.join(map(str, told))}" if told else "")
