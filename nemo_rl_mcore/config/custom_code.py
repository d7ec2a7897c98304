"""Code of the user's own: imported by the path that a recipe names; what it raises is told with its key and line.

What is in no module that another process could import, such as a function of a notebook, is handed over in its place.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

from pydantic import AfterValidator

from nemo_rl_mcore.config.base import StrictModel
from nemo_rl_mcore.errors import CustomCodeError, RefusedError

_NAME = r"[^\W\d]\w*"
_IMPORT_PATH = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}")


def _checked(path: str) -> str:
    if not _IMPORT_PATH.fullmatch(path):
        raise ValueError(
            f"{path!r} is no import path; write package.module:Name, as in my_pkg.losses:MyLossFn"
        )
    return path


ImportPath = Annotated[str, AfterValidator(_checked)]
"""`package.module:Name`, of a class at the top level of a module."""

Arguments = dict[str, Any]
"""Keyword arguments of such a class, as YAML gives them."""


class OwnClassConfig(StrictModel):
    """A section whose place a class of one's own can take."""

    type: ImportPath | None = None
    """Import path of a class that takes this one's place, `package.module:Name` (ours)."""
    args: Arguments | None = None
    """Keyword arguments of that class, beside what it is given of the run (ours)."""

    read_unless = (("args", "type", None),)


_OURS = str(Path(__file__).parents[1])
_LIBRARIES = (_OURS, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")


RAISED = "custom-code-raised"
"""The code of what the user's code raised, which it may not do another time; what it gave amiss has other codes."""
_HANDED: dict[str, object] = {}


@contextmanager
def handed(objects: Mapping[str, object]) -> Generator[None]:
    """Have import paths, such as `__main__:right`, stand for these functions and classes inside the block.

    Behind it modules are searched for where they were before.
    """
    before, here = dict(_HANDED), os.getcwd()
    seen = here in sys.path
    _HANDED.update(objects)
    try:
        yield
    finally:
        _HANDED.clear()
        _HANDED.update(before)
        if not seen and here in sys.path:
            sys.path.remove(here)


def handed_objects() -> dict[str, object]:
    """Return what import paths stand for here, for another process to hand on by `hand_over`."""
    return dict(_HANDED)


def hand_over(objects: Mapping[str, object]) -> None:
    """Have import paths stand for these functions and classes in this process from now on."""
    _HANDED.update(objects)


def is_library(file: str) -> bool:
    """Say whether a file is of this package, of Python or of an installed one, and not of the user's own code."""
    return file.startswith(_LIBRARIES)


class custom_code:  # a context manager; contextlib's would let a StopIteration through
    """Raise CustomCodeError for what the block raises, SystemExit among it. name: the key, and what is called.

    An error that says already what it is about passes through, as does what stops the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise the error in other words."""
        if isinstance(error, Exception | SystemExit) and not isinstance(error, CustomCodeError):
            raise CustomCodeError(f"{self._name} raised {_told(error)}", code=RAISED) from error


def _told(error: BaseException) -> str:
    """Return the error, the user's line, and the traceback from where the user's code begins."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    trace = _from_first(error.__traceback__, _LIBRARIES) or _from_first(error.__traceback__, (_OURS,))
    if trace is None:
        return what
    frames = traceback.extract_tb(trace)
    line = next((one for one in reversed(frames) if not is_library(one.filename)), frames[-1])
    shown = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    return f"{what} ({line.filename}:{line.lineno})\n{shown}"


def _from_first(trace: TracebackType | None, others: tuple[str, ...]) -> TracebackType | None:
    """Return the traceback without the frames of other files that it begins with."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(others):
        trace = trace.tb_next
    return trace


def build(
    path: str, key: str, arguments: Mapping[str, Any] | None, *positional: object, needs: Sequence[str]
) -> object:
    """Import a class and call it. `key` is that of the path; `needs` names the members that the class must have.

    "one|other" stands for a class that has at least one of the two.

    Raises ValueError, naming the key, for a module or class that is not there, for arguments that do not fit, and, with
    the user's line, for what the class itself raises.
    """
    kind, arguments = _class_at(path, key), arguments or {}
    abstract: frozenset[str] = getattr(kind, "__abstractmethods__", frozenset())

    def has(name: str) -> bool:
        return hasattr(kind, name) and name not in abstract

    if lacking := [_or(need) for need in needs if not any(map(has, need.split("|")))]:
        wanted = ", ".join(map(_or, needs))
        raise RefusedError(
            f"{key}: {path} lacks {', '.join(lacking)}; such a class has {wanted}", code="missing-member"
        )
    try:
        inspect.signature(kind).bind(*positional, **arguments)
    except TypeError as error:
        given = ", ".join(arguments) or "none"
        section = key.rpartition(".")[0]
        raise RefusedError(
            f"{section}.args: {path} cannot take these arguments ({given}): {error}", code="custom-arguments"
        ) from error
    with custom_code(f"{key}: {path}"):
        return kind(*positional, **arguments)


def function_at(path: str, key: str) -> Callable[..., Any]:
    """Import a function; raises as `build` for one that is not there. `key` is that of the path."""
    found = imported(path, key)
    if not callable(found) or isinstance(found, type):
        raise RefusedError(f"{key}: {path} is no function", code="no-function")
    return found


def _class_at(path: str, key: str) -> type:
    found = imported(path, key)
    if not isinstance(found, type):
        module, _, name = path.partition(":")
        raise ValueError(
            f"{key}: {path}: the module {module} holds something else than a class under the name {name}"
        )
    return found


def _or(need: str) -> str:
    return need.replace("|", " or ")


def imported(path: str, key: str) -> object:
    """Return what an import path stands for; raises as `build` for what is not there. `key` is that of the path."""
    if path in _HANDED:
        return _HANDED[path]
    module_name, _, name = path.partition(":")
    see_working_directory()
    with custom_code(f"{key}: {path}: its module"):
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise CustomCodeError(f"{key}: {path} cannot be imported: {error}") from error
    if not hasattr(module, name):
        raise ValueError(f"{key}: {path}: the module {module_name} has no {name}")
    return getattr(module, name)


def see_working_directory() -> None:
    """Let the driver import from the folder that it was started in, as the ranks can; what is installed comes first."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
        importlib.invalidate_caches()
