"""A run's folders and files, and recipe changes when a run resumes from them.

Files are complete or absent. Links are not followed, since another user may own a folder, as in /tmp. A kernel lock,
which ends with the process, lets only one run write to a folder at a time; it does not affect readers.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, cast

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.config.base import Problem, absolute_path, join_path
from nemo_rl_mcore.config.master import kind_of
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.run_config import ModelPlan
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.errors import RunStoppedError, folder_error, shortened
from nemo_rl_mcore.models.memory import checkpoint_bytes
from nemo_rl_mcore.models.pretrained import OF_TRAINING, explicit_fields
from nemo_rl_mcore.recipe.interpolations import value_now
from nemo_rl_mcore.recipe.yaml_text import read_yaml_text

_PROBE = b"\0" * 4096


def folders_of(config: RunConfig) -> dict[str, Path]:
    folders = {"logger.log_dir": Path(config.logger.log_dir)}
    if config.checkpointing.enabled:
        folders["checkpointing.checkpoint_dir"] = Path(config.checkpointing.checkpoint_dir)
    return folders


def folder_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each of a run's folders that cannot be written to; leave no files behind."""
    whole = True
    for key, folder in folders_of(config).items():
        nearest = nearest_folder(folder)
        try:
            if folder != nearest and nearest.is_dir():
                tempfile.TemporaryDirectory(dir=nearest).cleanup()
            try_to_write(nearest)
        except OSError as error:
            whole = False
            what = f"{str(folder)!r} cannot be written to: {str(nearest)!r}: {error.strerror}"
            yield Problem("not-writable", key, what, "name another folder")
    if whole and (problem := too_full(config)):
        yield problem


def try_to_write(folder: Path) -> None:
    """Write and remove an unnamed file in an existing folder; raise OSError on failure."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(_PROBE)


def nearest_folder(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def too_full(config: RunConfig) -> Problem | None:
    if not config.checkpointing.enabled:
        return None
    folder, needed = Path(config.checkpointing.checkpoint_dir), checkpoint_bytes(config)
    if needed <= (free := shutil.disk_usage(nearest_folder(folder)).free):
        return None
    what = f"{str(folder)!r} has {_gigabytes(free)} free, and a checkpoint takes about {_gigabytes(needed)}"
    return Problem("disk-full", "checkpointing.checkpoint_dir", what, "make room, or name another folder")


def checkpoints_on_disk(config: RunConfig) -> str:
    """Describe the largest number of checkpoints that the run keeps, and their size."""
    section = config.checkpointing
    if not section.enabled:
        return "none (checkpointing.enabled: false)"
    kept = -(-config.loop.max_num_steps // section.save_period)
    if section.keep_top_k is not None:
        # The newest one is kept in addition to the best.
        kept = min(kept, section.keep_top_k + (section.metric_name is not None))
    size = _gigabytes(kept * checkpoint_bytes(config))
    text = f"every {section.save_period} steps, {kept} kept at most, about {size} in {section.checkpoint_dir}"
    if copied := checkpoint_bytes(config, copies=True):
        text += f", written from a copy of about {_gigabytes(copied)} in the machines' memory (async_save)"
    return text


def _gigabytes(number: int) -> str:
    return f"{number / 1e9:.3g} GB"


TEMPORARY = ".tmp"


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """Yield a file that replaces `path` when the block ends; if the block raises, the old file remains.

    A link at `path` is replaced, not its target. Raises OSError.
    """
    temporary = path.with_name(f"{path.name}{TEMPORARY}")
    temporary.unlink(missing_ok=True)  # left by a killed process
    try:
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def open_own(path: Path, flags: int) -> int:
    """Open or create one of this run's files and return its descriptor; raise OSError for a link or a pipe."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return descriptor


def open_to_append(path: Path, *, buffering: int = 0) -> BinaryIO:
    """Open a file for appending; raise OSError for a link or a pipe."""
    return cast("BinaryIO", open(open_own(path, os.O_RDWR | os.O_APPEND), "ab", buffering=buffering))


def next_free(path: Path) -> Path:
    """Return the new name for an earlier run's file: `metrics.1.jsonl`, or a later number."""
    number = 1
    while os.path.lexists(renamed := path.with_name(f"{path.stem}.{number}{path.suffix}")):
        number += 1
    return renamed


RECIPE_FILE = "config.yaml"
TOKENIZER_FOLDER = "tokenizer"

Tree = Mapping[str, object]

_WITHOUT_EFFECT = (
    *("checkpointing", "logger", "env.pool", "policy.init_checkpoint", "policy.model_name"),
    *("env.endpoint.processes", "cluster.in_process", "input_digests"),
)
"""A run's files, the places of scoring, and weights that the checkpoint has replaced."""
_OF_THE_STATE = ("policy.precision", *("policy.megatron_cfg.freeze", "policy.megatron_cfg.freeze_moe_router"))
"""Keys that, besides the architecture, determine which tensors a model's checkpoint holds."""
_OF_THE_ANSWERS = (
    *("policy.generation.temperature", "policy.generation.top_p", "policy.generation.top_k"),
    *("policy.generation.max_new_tokens", "policy.generation.fit_to_sequence"),
    *("policy.generation.stop_token_ids", "policy.generation.stop_strings"),
    *("policy.max_total_sequence_length", "env"),
)
_NOT_IN_WEIGHTS = OF_TRAINING | {"max_position_embeddings"}


@dataclass(frozen=True)
class Change:
    path: str
    was: object
    now: object

    def __str__(self) -> str:
        return f"{self.path}: {shown_value(self.now)} (was {shown_value(self.was)})"


def recipe_text(config: RunConfig) -> str:
    """Return the resolved recipe as YAML, valid in any directory; environment values stay references."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def read_recipe_of(folder: Path) -> Tree:
    """Return the recipe in a checkpoint's folder; raise ValueError if there is none."""
    path = folder / RECIPE_FILE
    try:
        recipe: object = yaml.safe_load(read_yaml_text(path, follow_links=False, aliases=False))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = shortened(" ".join(str(error).split()), 300)
        raise ValueError(f"{str(folder)!r} is not a checkpoint: {path} cannot be read: {reason}") from error
    if not isinstance(recipe, dict) or "defaults" in recipe:
        raise ValueError(f"{str(folder)!r} is not a checkpoint: {path} holds no recipe")
    return cast("Tree", recipe)


def changes_since(saved: Tree, config: RunConfig) -> list[Change]:
    """Return the recipe changes from `saved` to `config` that affect a resumed run's result."""
    before, after, shown = (
        dict(leaves(tree)) for tree in (saved, config.plain(), config.model_dump(mode="json"))
    )
    found, inputs = saved.get("input_digests"), config.input_digests or {}
    inputs_before = cast("Mapping[str, object]", found) if isinstance(found, dict) else {}

    def changed(path: str) -> Change | None:
        was, now = before.get(path), after.get(path)
        if path in inputs and path in inputs_before:
            same = inputs[path] == inputs_before[path]
            if not same and was == now:
                return Change(path, inputs_before[path], inputs[path])
        elif isinstance(was, str) and "${" in was:  # its value is then unknown
            same = was == shown.get(path) or value_now(was) == str(now)
        else:
            new = path not in before and now == _default_of(config, path)
            # A folder's path may have been saved unresolved.
            named = path.rpartition(".")[2] in ("model_name", "init_checkpoint") or path.endswith(
                "tokenizer.name"
            )
            same = new or was == now or (named and isinstance(was, str) and absolute_path(was) == now)
        hidden = shown.get(path) != now
        return None if same else Change(path, "another value" if hidden else was, shown.get(path))

    inside = tuple(f"{path}." for path, was in before.items() if isinstance(was, str) and "${" in was)
    paths = (
        path
        for path in {**after, **before, **inputs}
        if not (_below(path, _WITHOUT_EFFECT) or path.endswith("_timeout_s"))  # deadlines
        and not path.startswith(inside)
    )
    return [change for path in paths if (change := changed(path)) is not None]


def _default_of(config: RunConfig, path: str) -> object:
    """Return a key's default as JSON."""
    *sections, name = path.split(".")
    section: object = config
    for key in sections:
        section = getattr(section, key, None)
    field = type(section).model_fields.get(name) if isinstance(section, BaseModel) else None
    return (
        to_jsonable_python(field.get_default(call_default_factory=True, validated_data={})) if field else None
    )


def changes_of_answers(saved: Tree, config: RunConfig) -> list[Change]:
    """Return the changes that invalidate saved answers: changes to sampling, scoring and the maximum age."""
    changes = changes_since(saved, config)
    turns = f"{config.algorithm}.max_rollout_turns"
    drawn = [change for change in changes if _below(change.path, (*_OF_THE_ANSWERS, turns))]
    max_age, order = (f"{config.key('asynchrony')}.{key}" for key in ("max_trajectory_age_steps", "order"))
    for one in changes:
        longer = isinstance(one.now, int) and isinstance(one.was, int) and one.now >= one.was
        if one.path == order or (one.path == max_age and not longer):
            drawn.append(one)
    return drawn


def does_not_fit(saved: Tree, plan: ModelPlan) -> list[str]:
    """Return the fields in which a saved policy's architecture differs from a run's model."""
    section = saved.get("policy")
    model = cast("Tree", section).get("model") if isinstance(section, dict) else None
    try:
        theirs = explicit_fields(ModelConfig.model_validate(model))
    except ValidationError as error:
        return [f"its policy.model cannot be read: {error.error_count()} wrong fields"]
    ours = explicit_fields(plan.policy.model)
    return [
        str(Change(plan.key(f"policy.model.{key}"), theirs[key], ours[key]))
        for key in theirs
        if key not in _NOT_IN_WEIGHTS and ours[key] != theirs[key]
    ]


def cannot_resume(saved: Tree, config: RunConfig) -> str | None:
    """Return None if a run can resume from another recipe's checkpoint, else the reason, with a remedy."""
    before = kind_of(saved).algorithm
    if before != config.algorithm:
        return (
            f"was saved by a run of {before}, and this is one of {config.algorithm}; name another "
            "checkpointing.checkpoint_dir (policy.init_checkpoint takes the weights alone)"
        )
    trained = [plan for plan in config.models.values() if plan.trained]
    of_the_state = tuple(plan.key(path) for plan in trained for path in _OF_THE_STATE)
    misfits = [misfit for plan in trained for misfit in does_not_fit(saved, plan)]
    misfits += [str(change) for change in changes_since(saved, config) if _below(change.path, of_the_state)]
    if not misfits:
        return None
    return (
        f"was saved under another policy: {', '.join(dict.fromkeys(misfits))}; set it back, or name another "
        "checkpointing.checkpoint_dir"
    )


def init_checkpoint_problems(plan: ModelPlan) -> Iterator[Problem]:
    """Yield a problem if a model's init_checkpoint cannot be loaded, judging by the checkpoint's recipe."""
    folder = plan.policy.init_checkpoint
    if folder is None:
        return
    key, remedy = plan.key("policy.init_checkpoint"), "name a folder step_N of a run with this architecture"
    try:
        differing = does_not_fit(read_recipe_of(Path(folder)), plan)
    except ValueError as error:
        yield Problem("not-readable", key, str(error), remedy)
        return
    if differing:
        yield Problem("other-model", key, f"{folder!r} holds another model: {', '.join(differing)}", remedy)


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield a recipe's values with their paths; lists and empty sections count as values."""
    for key, value in tree.items():
        path = join_path(prefix, key)
        if isinstance(value, dict) and value:
            yield from leaves(cast("Tree", value), path)
        else:
            yield path, value


def _below(path: str, sections: tuple[str, ...]) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)


def shown_value(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


LOCK_FILE = ".lock"
_held: set[tuple[int, int]] = set()
"""Device and inode of each folder that this process has locked."""


@contextmanager
def run_folders(config: RunConfig) -> Generator[None]:
    """Hold a run's folders as `held_folders` does; raise RunStoppedError if a checkpoint would not fit, too."""
    with held_folders(folders_of(config)):
        if problem := too_full(config):
            raise RunStoppedError(str(problem))
        yield


def leave_recipe(config: RunConfig) -> None:
    """Write the resolved recipe to the run's folder, and set a different one aside; raise FolderError on failure."""
    folder = Path(config.logger.log_dir)
    path = folder / RECIPE_FILE
    text = recipe_text(config).encode()
    try:
        if path.is_file() and path.read_bytes() != text:
            path.rename(next_free(path))
        with replacing(path) as file:
            file.write(text)
    except OSError as error:
        raise folder_error("logger.log_dir", folder, error) from error


@contextmanager
def held_folders(folders: Mapping[str, Path]) -> Generator[None]:
    """Create folders, given by recipe key, and lock them for the duration of the block.

    Raises RunStoppedError, naming key and folder, if another process holds a folder or a folder cannot be written to.
    """
    with ExitStack() as held:
        for key, folder in folders.items():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(_locked(key, folder))
                try_to_write(folder)
            except OSError as error:
                raise RunStoppedError(str(folder_error(key, folder, error, "name another folder"))) from error
        yield


@contextmanager
def _locked(key: str, folder: Path) -> Generator[None]:
    found = folder.stat()
    identity = found.st_dev, found.st_ino
    if identity in _held:  # the same folder under two keys, or in two recipes of a run
        yield
        return
    # Children do not inherit the descriptor, so none keeps the lock after this process ends.
    path = folder / LOCK_FILE
    with open(open_own(path, os.O_RDWR | os.O_APPEND), "a+", encoding="utf-8") as file:
        if os.fstat(file.fileno()).st_nlink > 1:
            raise OSError(errno.EINVAL, f"{path.name} has other hard links", str(path))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunStoppedError(
                f"{key}: {folder} is in use by another run ({file.read().strip() or 'which is just starting'}); wait "
                "for it to end, or name another folder"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            write_line(
                sys.stderr, f"{key}: {folder} cannot be locked ({error.strerror}): start no second run in it"
            )
        file.truncate(0)
        file.write(
            f"host {socket.gethostname()}, pid {os.getpid()}, since {datetime.now():%Y-%m-%d %H:%M:%S}\n"
        )
        file.flush()
        _held.add(identity)
        try:
            yield
        finally:
            _held.discard(identity)
