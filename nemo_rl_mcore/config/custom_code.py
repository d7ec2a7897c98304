"""User code: imported by a path in the recipe; its exceptions are reported with the recipe's key and the user's line.

Objects that no other process could import, such as a notebook's functions, are sent instead of imported.
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
            f"{path!r} is not an import path; write package.module:Name, as in my_pkg.losses:MyLossFn"
        )
    return path


ImportPath = Annotated[str, AfterValidator(_checked)]
"""Import path `package.module:Name` of a class at a module's top level."""

Arguments = dict[str, Any]
"""Keyword arguments for such a class, as read from YAML."""


class OwnClassConfig(StrictModel):
    """A section that a user-defined class can replace."""

    type: ImportPath | None = None
    """Import path of your class, `package.module:Name`; null if not used (ours)."""
    args: Arguments | None = None
    """Additional keyword arguments for your class; null means none (ours)."""

    read_unless = (("args", "type", None),)


_OURS = str(Path(__file__).parents[1])
LIBRARIES = (_OURS, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")
"""Prefixes of file names that are no user code: this package, Python, and installed packages."""


RAISED = "custom-code-raised"
"""Error code for an exception in user code, which may not recur; invalid return values have other codes."""
HANDED: dict[str, object] = {}
"""This process's functions and classes that cannot be imported, by import path; other processes receive a copy."""


@contextmanager
def handed(objects: Mapping[str, object]) -> Generator[None]:
    """Map import paths, such as `__main__:right`, to these functions and classes inside the block.

    On exit, restore the previous mapping and module search path.
    """
    before, here = dict(HANDED), os.getcwd()
    seen = here in sys.path
    HANDED.update(objects)
    try:
        yield
    finally:
        HANDED.clear()
        HANDED.update(before)
        if not seen and here in sys.path:
            sys.path.remove(here)


class custom_code:  # a context manager; contextlib's would let a StopIteration through
    """Convert exceptions in the block, including SystemExit, to CustomCodeError. name: the key and the called object.

    CustomCodeError and exceptions that stop the process, such as KeyboardInterrupt, pass through.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        """Enter without any action."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, CustomCodeError):
            raise CustomCodeError(f"{self._name} raised {_told(error)}", code=RAISED) from error


def _told(error: BaseException) -> str:
    """Return the error message, the user's line, and the traceback from the start of user code."""
    what, trace = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, None
    for others in (LIBRARIES, (_OURS,)):
        if trace is None:
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename.startswith(others):
                trace = trace.tb_next
    if trace is None:
        return what
    frames = traceback.extract_tb(trace)
    line = next((one for one in reversed(frames) if not one.filename.startswith(LIBRARIES)), frames[-1])
    shown = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    return f"{what} ({line.filename}:{line.lineno})\n{shown}"


def build(
    path: str, key: str, arguments: Mapping[str, Any] | None, *positional: object, needs: Sequence[str]
) -> object:
    """Import a class and instantiate it. key: the key of `path`. needs: members that the class must have.

    In `needs`, "one|other" requires at least one of the two.

    Raises ValueError with the key for a missing module or class, for unsuitable arguments and, with the user's line,
    for exceptions in the class itself.
    """
    kind, arguments = imported(path, key), arguments or {}
    if not isinstance(kind, type):
        module, _, name = path.partition(":")
        raise ValueError(f"{key}: {path}: {name} in the module {module} is not a class")
    abstract: frozenset[str] = getattr(kind, "__abstractmethods__", frozenset())

    there = {name for name in dir(kind) if name not in abstract}
    if lacking := [need for need in needs if there.isdisjoint(need.split("|"))]:
        lacks, wanted = (", ".join(some).replace("|", " or ") for some in (lacking, needs))
        raise RefusedError(f"{key}: {path} lacks {lacks}; such a class has {wanted}", code="missing-member")
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
    """Import a function; raises as `build` does for a missing function. key: the key of `path`."""
    found = imported(path, key)
    if not callable(found) or isinstance(found, type):
        raise RefusedError(f"{key}: {path} is not a function", code="no-function")
    return found


def imported(path: str, key: str) -> object:
    """Return the object at an import path; raises as `build` does for a missing object. key: the key of `path`."""
    if path in HANDED:
        return HANDED[path]
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
    """Let the driver import from its working directory, as ranks do; installed packages take precedence."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
        importlib.invalidate_caches()
