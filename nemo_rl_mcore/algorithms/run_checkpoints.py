"""Where a run begins, and what it leaves behind to begin from, as the section `checkpointing` asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.config.saved_run import (
    RECIPE_FILE,
    cannot_resume,
    changes_since,
    read_recipe_of,
    recipe_text,
)
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.interfaces import TrainedModel
from nemo_rl_mcore.training.checkpoints import (
    Checkpoint,
    CheckpointStore,
    NotACheckpointError,
    Retention,
    require_checkpoint,
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunCheckpoints:
    """The checkpoints of a run; without a store the run starts at its first step and leaves none.

    recipe: what is saved as config.yaml. start: the checkpoint to go on from.
    """

    store: CheckpointStore | None = None
    save_period: int = 1
    last_step: int = 0
    recipe: str = ""
    start: Checkpoint | None = None

    @property
    def resumed_step(self) -> int | None:
        """The last step that is behind the run, if it goes on from a checkpoint."""
        return self.start.step if self.start is not None else None

    def restore(self, models: Mapping[str, TrainedModel]) -> Mapping[str, Any]:
        """Set the models back to where the run goes on, and return the counters that were saved with them."""
        if self.start is None:
            return {}
        for name, model in models.items():
            model.load_checkpoint(str((self.start.folder / name).absolute()))
        return self.start.counters

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to follow this step."""
        return self.store is not None and (step % self.save_period == 0 or step == self.last_step)

    def save(
        self,
        step: int,
        models: Mapping[str, TrainedModel],
        metrics: Mapping[str, float],
        counters: Mapping[str, Any],
    ) -> None:
        """Write the checkpoint of a finished step. The data needs no position: prompts are drawn by (seed, step)."""
        assert self.store is not None
        with self.store.writing(step, metrics, counters) as folder:
            (folder / RECIPE_FILE).write_text(self.recipe, encoding="utf-8")
            for name, model in models.items():
                (folder / name).mkdir()
                model.save_checkpoint(str(folder / name))


def open_checkpoints(config: RunConfig, say: Say) -> RunCheckpoints:
    """Find where the run begins and prepare the folder for what it leaves; `say` is told in whole lines.

    Raises RunStoppedError when the checkpoint to go on from, or to take weights from, is none or of another model.
    """
    for plan in config.models.values():
        if plan.policy.init_checkpoint is not None:
            _require(plan.policy.init_checkpoint, plan.key("policy.init_checkpoint"))
    section = config.checkpointing
    if not section.enabled:
        return RunCheckpoints()
    retention = Retention(section.keep_top_k, section.logged_metric, section.higher_is_better)
    store = CheckpointStore(Path(section.checkpoint_dir), retention)
    start = _find_start(section.resume, store)
    if start is not None:
        _compare(start, config, say)
    for folder in store.begin_after(start.step if start is not None else 0):
        say(f"set aside: {folder}")
    return RunCheckpoints(store, section.save_period, config.loop.max_num_steps, recipe_text(config), start)


def _find_start(resume: str, store: CheckpointStore) -> Checkpoint | None:
    if resume == "never":
        return None
    if resume == "auto":
        return store.latest()
    return _require(resume, "checkpointing.resume")


def _require(folder: str, key: str) -> Checkpoint:
    try:
        return require_checkpoint(Path(folder), key)
    except NotACheckpointError as error:
        raise RunStoppedError(str(error)) from error


def _compare(start: Checkpoint, config: RunConfig, say: Say) -> None:
    """Refuse a checkpoint of another algorithm, or whose state has no place in the models; tell what has changed."""
    try:
        saved = read_recipe_of(start.folder)
    except ValueError as error:
        raise RunStoppedError(str(error)) from error
    if reason := cannot_resume(saved, config):
        raise RunStoppedError(f"checkpointing.resume: {start.folder} {reason}")
    changes = [str(change) for change in changes_since(saved, config)]
    say(
        f"resuming after step {start.step} from {start.folder}"
        + (f", with changes: {', '.join(changes)}" if changes else "")
    )
