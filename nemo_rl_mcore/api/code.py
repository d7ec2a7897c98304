"""Functions and classes that stand in a recipe of Python, in place of their import paths."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from nemo_rl_mcore.config.base import ConfigError, Problem, Tree, join_path

_HERE = "__main__"


@dataclass
class Code:
    """The code of a run that no other process could import, by the import path that stands for it in the recipe."""

    objects: dict[str, object] = field(default_factory=dict[str, object])

    def named(self, tree: Mapping[str, object], prefix: str = "") -> Tree:
        """Return a recipe with import paths in place of classes and all that can be called, wherever they stand."""
        return {key: self._named(value, join_path(prefix, key)) for key, value in tree.items()}

    def _named(self, value: object, path: str) -> object:
        if isinstance(value, Mapping):
            return self.named(cast("Mapping[str, object]", value), path)
        if not callable(value):
            return value
        module, name = (str(getattr(value, attribute, "")) for attribute in ("__module__", "__qualname__"))
        if module != _HERE and getattr(sys.modules.get(module), name, None) is value:
            return f"{module}:{name}"
        own = getattr(value, "__name__", "")
        return self._kept(f"{_HERE}:{own if own.isidentifier() else path.rpartition('.')[2]}", value)

    def _kept(self, path: str, value: object) -> str:
        """Return the path, with a number where another object has it."""
        number, free = 1, path
        while self.objects.get(free, value) is not value:
            number += 1
            free = f"{path}_{number}"
        self.objects[free] = value
        return free

    def require_portable(self) -> None:
        """Raise ConfigError for code that holds what cannot be sent to another process, such as an open file."""
        from ray import cloudpickle

        problems = list[Problem]()
        for path, value in self.objects.items():
            try:
                cast("Any", cloudpickle).dumps(value)
            except Exception as error:  # noqa: BLE001 what it raises depends on what the code holds
                what = f"cannot be sent to another process: {type(error).__name__}: {error}"
                problems.append(
                    Problem(
                        "not-supported", path, what, "make what it needs inside it, or put it into a module"
                    )
                )
        if problems:
            raise ConfigError(problems)
