"""The folders of a run, the files that it leaves there, and what a run that goes on from there has changed.

Files are whole or not there, and never something else under their name: a folder may be one that somebody else has
made first, as in /tmp, and what is a link there is not followed. One run writes into a folder at a time. The lock is
the kernel's: it is free when the process is gone, whatever ended it, and whoever only reads takes no notice of it.
"""

from __future__ import annotations

import errno
import fcntl
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
from nemo_rl_mcore.models.memory import checkpoint_bytes, copied_bytes
from nemo_rl_mcore.models.pretrained import OF_TRAINING, explicit_fields
from nemo_rl_mcore.recipe.environment_values import value_now
from nemo_rl_mcore.recipe.yaml_text import read_yaml_text

_PROBE = b"\0" * 4096


def folders_of(config: RunConfig) -> dict[str, Path]:
    folders = {"logger.log_dir": Path(config.logger.log_dir)}
    if config.checkpointing.enabled:
        folders["checkpointing.checkpoint_dir"] = Path(config.checkpointing.checkpoint_dir)
    return folders


def folder_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what stops a run from writing there, and leave nothing behind."""
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
    """Write a file into a folder that is there, which has no name and is gone at once; raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(_PROBE)


def nearest_folder(folder: Path) -> Path:
    """Return the folder, or the innermost one above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def too_full(config: RunConfig) -> Problem | None:
    if not config.checkpointing.enabled:
        return None
    folder = Path(config.checkpointing.checkpoint_dir)
    needed, free = checkpoint_bytes(config), shutil.disk_usage(nearest_folder(folder)).free
    if needed <= free:
        return None
    return Problem(
        "disk-full",
        "checkpointing.checkpoint_dir",
        f"{str(folder)!r} has {_gigabytes(free)} free, and a checkpoint takes about {_gigabytes(needed)}",
        "make room, or name another folder",
    )


def checkpoints_on_disk(config: RunConfig) -> str:
    """Say how many checkpoints the run keeps at most, and what they take."""
    section = config.checkpointing
    if not section.enabled:
        return "none (checkpointing.enabled: false)"
    kept = -(-config.loop.max_num_steps // section.save_period)
    if section.keep_top_k is not None:
        # The newest one is kept in addition to the best.
        kept = min(kept, section.keep_top_k + (section.metric_name is not None))
    size, copied = _gigabytes(kept * checkpoint_bytes(config)), copied_bytes(config)
    where = (
        f"every {section.save_period} steps, {kept} kept at most, about {size} in {section.checkpoint_dir}"
    )
    if copied:
        where += f", written from a copy of about {_gigabytes(copied)} in the machines' memory (async_save)"
    return where


def _gigabytes(number: int) -> str:
    return f"{number / 1e9:.3g} GB"


TEMPORARY = ".tmp"


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """Yield a file that takes the place of `path` when the block ends; where it raises, the old one stays.

    A link at `path` is replaced itself. Raises OSError.
    """
    temporary = path.with_name(f"{path.name}{TEMPORARY}")
    temporary.unlink(missing_ok=True)  # of a process that was killed
    try:
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def open_own(path: Path, flags: int) -> int:
    """Open a file that this run goes on with, or make it; its descriptor. Raises OSError for a link or a pipe."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return descriptor


def open_to_append(path: Path, *, buffering: int = 0) -> BinaryIO:
    """Open a file for appending; raises OSError for a link or a pipe."""
    return cast("BinaryIO", open(open_own(path, os.O_RDWR | os.O_APPEND), "ab", buffering=buffering))


def next_free(path: Path) -> Path:
    """Return the name under which what an earlier run left is put aside: `metrics.1.jsonl`, or a later number."""
    number = 1
    while os.path.lexists(renamed := path.with_name(f"{path.stem}.{number}{path.suffix}")):
        number += 1
    return renamed


RECIPE_FILE = "config.yaml"
TOKENIZER_FOLDER = "tokenizer"

Tree = Mapping[str, object]

_WITHOUT_EFFECT = (
    *("checkpointing", "logger", "env.pool", "policy.init_checkpoint", "policy.model_name"),
    *("env.endpoint.processes", "env.endpoint.one_process", "input_digests"),
)
"""What a run leaves behind, where answers are scored, and the weights that the checkpoint has replaced."""
_ENDINGS_WITHOUT_EFFECT = ("_timeout_s",)
"""Deadlines between the driver, ranks and engines."""
_OF_THE_STATE = (
    "policy.precision",
    *("policy.megatron_cfg.freeze", "policy.megatron_cfg.freeze_moe_router"),
)
"""What decides which tensors the checkpoint of a model holds, besides the architecture."""
_OF_THE_ANSWERS = (
    *(
        f"policy.generation.{key}"
        for key in (
            *("temperature", "top_p", "top_k", "max_new_tokens", "fit_to_sequence"),
            *("stop_token_ids", "stop_strings"),
        )
    ),
    "policy.max_total_sequence_length",
    "env",
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
    """Return the resolved recipe as YAML, to be saved; it loads again to the same configuration, in any directory.

    What it takes from the environment stays a reference.
    """
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def read_recipe_of(folder: Path) -> Tree:
    """Return the recipe in a checkpoint's folder; raises ValueError when there is none, as `recipe_text` writes it."""
    path = folder / RECIPE_FILE
    try:
        recipe: object = yaml.safe_load(read_yaml_text(path, follow_links=False, aliases=False))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = shortened(" ".join(str(error).split()), 300)
        raise ValueError(f"{str(folder)!r} is no checkpoint: {path} cannot be read: {reason}") from error
    if not isinstance(recipe, dict) or "defaults" in recipe:
        raise ValueError(f"{str(folder)!r} is no checkpoint: {path} holds no recipe")
    return cast("Tree", recipe)


def changes_since(saved: Tree, config: RunConfig) -> list[Change]:
    """Return what changes the result of a run that was saved under `saved` and goes on under `config`."""
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
        elif isinstance(was, str) and "${" in was:  # what the environment gave then, nobody knows
            same = was == shown.get(path) or value_now(was) == str(now)
        else:
            new = path not in before and now == _default_of(config, path)
            # A folder's path may have been saved as it was written.
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
        if not (_below(path, _WITHOUT_EFFECT) or path.endswith(_ENDINGS_WITHOUT_EFFECT))
        and not path.startswith(inside)
    )
    return [change for path in paths if (change := changed(path)) is not None]


def _default_of(config: RunConfig, path: str) -> object:
    """Return the default of a key as JSON has it: what was saved without the key ran as with that."""
    *sections, name = path.split(".")
    section: object = config
    for key in sections:
        section = getattr(section, key, None)
    field = type(section).model_fields.get(name) if isinstance(section, BaseModel) else None
    return (
        to_jsonable_python(field.get_default(call_default_factory=True, validated_data={})) if field else None
    )


def changes_of_answers(saved: Tree, config: RunConfig) -> list[Change]:
    """Those by which saved answers are none of the run: how they are drawn and scored, and how old they may be."""
    changes = changes_since(saved, config)
    turns = f"{config.algorithm}.max_rollout_turns"
    drawn = [change for change in changes if _below(change.path, (*_OF_THE_ANSWERS, turns))]
    max_age, order = (f"{config.asynchrony_key}.{key}" for key in ("max_trajectory_age_steps", "order"))
    for one in changes:
        longer = isinstance(one.now, int) and isinstance(one.was, int) and one.now >= one.was
        if one.path == order or (one.path == max_age and not longer):
            drawn.append(one)
    return drawn


def does_not_fit(saved: Tree, plan: ModelPlan) -> list[str]:
    """In which fields the architecture of a saved policy is not that of a model of the run."""
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
    """Return why a run cannot go on from what was saved under another recipe, and the way out; None where it can."""
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
    """Yield what stops a model's init_checkpoint from being loaded, as far as its recipe tells."""
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
    """Yield the values of a recipe with their paths; lists and empty sections are values."""
    for key, value in tree.items():
        path = join_path(prefix, key)
        if isinstance(value, dict) and value:
            yield from leaves(cast("Tree", value), path)
        else:
            yield path, value


def _below(path: str, sections: tuple[str, ...]) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)


def shown_value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


LOCK_FILE = ".lock"
_held: set[tuple[int, int]] = set()
"""Device and inode of the folders that this process has locked."""


@contextmanager
def run_folders(config: RunConfig) -> Generator[None]:
    """Make the folders of a run and hold them for the block; nothing else is written or set aside before.

    Raises RunStoppedError, naming key and folder, where another run holds one, where one cannot be written to, and
    where a checkpoint would not fit.
    """
    with held_folders(folders_of(config)):
        if problem := too_full(config):
            raise RunStoppedError(str(problem))
        yield


def leave_recipe(config: RunConfig) -> None:
    """Write the resolved recipe into the folder of the run; another one that is there is put aside by number.

    Raises FolderError.
    """
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
    """Make folders, by the keys that name them, and hold them for the block.

    Raises RunStoppedError, naming key and folder, where another process holds one, and where one cannot be written to.
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
    if identity in _held:  # one folder under two keys, or of two recipes of a run
        yield
        return
    # No child inherits the descriptor, so that none keeps the lock when this process is gone.
    path = folder / LOCK_FILE
    with open(open_own(path, os.O_RDWR | os.O_APPEND), "a+", encoding="utf-8") as file:
        if os.fstat(file.fileno()).st_nlink > 1:
            raise OSError(errno.EINVAL, f"{path.name} is no file of its folder alone", str(path))
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
