"""Classes of the user's own, named in a recipe as `package.module:Name`.

A recipe is checked without importing them: `check` reads the path, and only a run imports what it names.
"""

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator

from nemo_rl_mcore.config.base import Problem

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


def import_problems(paths: Mapping[str, str]) -> Iterator[Problem]:
    """Yield packages that are not there, of paths by their key; to look into one would import it."""
    _see_working_directory()
    for key, path in paths.items():
        package = path.partition(":")[0].partition(".")[0]
        if importlib.util.find_spec(package) is None:
            yield Problem(
                key,
                f"{path}: there is no module {package} in {os.getcwd()}, on PYTHONPATH or installed",
                "start the command where it lies, or put its folder on PYTHONPATH",
            )


def build(
    path: str, key: str, arguments: Mapping[str, Any] | None, *positional: object, needs: Sequence[str]
) -> object:
    """Import a class and call it. `key` is that of the path; `needs` names the members that the class must have.

    Raises ValueError, naming the key, for a module or class that is not there, and for arguments that do not fit.
    What the class itself raises passes through.
    """
    kind, arguments = _imported(path, key), arguments or {}
    abstract: frozenset[str] = getattr(kind, "__abstractmethods__", frozenset())
    if lacking := [name for name in needs if not hasattr(kind, name) or name in abstract]:
        raise ValueError(f"{key}: {path} lacks {', '.join(lacking)}; such a class has {', '.join(needs)}")
    try:
        inspect.signature(kind).bind(*positional, **arguments)
    except TypeError as error:
        given = ", ".join(arguments) or "none"
        section = key.rpartition(".")[0]
        raise ValueError(f"{section}.args: {path} cannot take these arguments ({given}): {error}") from error
    return kind(*positional, **arguments)


def _imported(path: str, key: str) -> type:
    module_name, _, name = path.partition(":")
    _see_working_directory()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{key}: {path} cannot be imported: {error}") from error
    kind = getattr(module, name, None)
    if not isinstance(kind, type):
        what = "has no" if kind is None else "holds something else than a class under the name"
        raise ValueError(f"{key}: {path}: the module {module_name} {what} {name}")
    return kind


def _see_working_directory() -> None:
    """Let the driver import from the folder that it was started in, as the ranks can; what is installed comes first."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
        importlib.invalidate_caches()
