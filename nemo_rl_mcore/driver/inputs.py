"""What a run rests on besides its recipe: rows, and code of the user's own; kept as digests, by their keys.

Code is a function's source, with that of whatever of the user's own it names, and the values that it holds.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from glob import glob
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from nemo_rl_mcore.config.custom_code import imported, is_library
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import TEXT_FILES

_BLOCK = 1 << 20
_BLOCKS = 256
"""Of a larger file no more are read, spread evenly: the start of a run does not wait for a whole disk."""
_DIGITS = 12
_PLAIN = (str, bytes, int, float, complex, type(None))


def with_inputs(config: RunConfig) -> RunConfig:
    """Return a recipe with the digests of what a run of it reads now; its code is importable."""
    found = {key: _digest("content", _content(paths)) for key, paths in _files_of(config).items()}
    for key, path in config.import_paths.items():
        found[key] = _digest(
            "code", (part.encode("utf-8", "replace") for part in _code(imported(path, key), {}))
        )
    return config.model_copy(update={"input_digests": found})


def _digest(what: str, parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8) + part)
    return f"{what} {total.hexdigest()[:_DIGITS]}"


def _files_of(config: RunConfig) -> dict[str, list[Path]]:
    """Return the files of rows, of prompts and of agents that are on this machine, by their keys."""
    named: dict[str, Iterable[str]] = {}
    for key, source in (config.train_sources | config.validation_sources).items():
        named[f"{key}.data_path"] = [file for path in source.paths for file in sorted(glob(path)) or [path]]
        named |= {f"{key}.{name}": [path] for name in TEXT_FILES if (path := getattr(source, name))}
    if config.env.endpoint is not None:
        named["env.endpoint.command"] = config.env.endpoint.command[1:]
    found = {key: [file for one in paths for file in _files_at(Path(one))] for key, paths in named.items()}
    return {key: files for key, files in found.items() if files}


def _files_at(path: Path) -> list[Path]:
    """Return the file, or those in a folder that are neither hidden nor another user's."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    inside = (one for one in sorted(path.rglob("[!.]*")) if one.is_file() and os.access(one, os.R_OK))
    return [one for one in inside if not any(part.startswith(".") for part in one.relative_to(path).parts)]


def _content(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in paths:
        size = path.stat().st_size
        blocks = -(-size // _BLOCK)
        yield size.to_bytes(8)
        with path.open("rb") as file:
            for block in (*range(0, blocks, max(1, -(-blocks // _BLOCKS))), max(0, blocks - 1)):
                file.seek(block * _BLOCK)
                yield file.read(_BLOCK)


def _code(value: object, seen: dict[int, object]) -> Iterator[str]:
    """Yield what decides what a value does; of what is neither plain nor the user's own, nothing."""
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, set | frozenset):
        yield from sorted("".join(_code(one, seen)) for one in cast("set[object]", value))
    elif id(value) not in seen:
        seen[id(value)] = value  # held, so that no other object has its id
        made_of = next(parts for kind, parts in _MADE_OF.items() if isinstance(value, kind))
        for one in made_of(value):
            yield from _code(one, seen)


def _of_function(function: FunctionType) -> Iterator[object]:
    """Yield its source, or its code where it has none alone; its defaults; what it encloses; the globals it names."""
    source: object = function.__code__
    if function.__name__ != "<lambda>":  # whose lines may hold anything else
        with suppress(OSError, TypeError):
            source = inspect.getsource(function)
    yield source
    yield function.__defaults__
    yield function.__kwdefaults__
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty one
            yield cell.cell_contents
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _of_module(module: ModuleType) -> Iterable[object]:
    file = module.__file__ or "<frozen"
    return () if is_library(file) else (Path(file).read_bytes(),)


def _of_instance(one: object) -> Iterable[object]:
    """Return the class of an instance, and what it holds; of one that a library has made around a function, that."""
    held: dict[str, object] = getattr(one, "__dict__", {})
    return (one.__class__, held) if _is_own(one.__class__) else (held.get("__wrapped__"),)


def _members(kind: type) -> dict[str, object]:
    """Return what a class defines, without what Python notes of it, such as its line."""
    named = vars(kind).items()
    return {name: one for name, one in named if not name.startswith("__") or callable(one)}


def _is_own(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or not is_library(file or "<frozen")


_MADE_OF: dict[type, Callable[[Any], Iterable[object]]] = {
    dict: lambda one: (part for pair in one.items() for part in pair),
    list: iter,
    tuple: iter,
    re.Pattern: lambda one: (one.pattern, one.flags),
    partial: lambda one: (one.func, one.args, one.keywords),
    MethodType: lambda one: (one.__func__, one.__self__),
    staticmethod: lambda one: (one.__func__,),
    classmethod: lambda one: (one.__func__,),
    property: lambda one: (one.fget, one.fset),
    CodeType: lambda one: (one.co_code, one.co_names, one.co_consts),
    FunctionType: lambda one: () if is_library(one.__code__.co_filename) else _of_function(one),
    ModuleType: _of_module,
    type: lambda one: (one.__qualname__, one.__bases__, _members(one)) if _is_own(one) else (),
    object: _of_instance,
}
"""What the code of a value is made of, by the first kind that it is of."""
