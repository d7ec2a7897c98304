"""A recipe under construction: what an argument sets, where that is told from, and code that stands in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from nemo_rl_mcore.api.rows import Data, source_of
from nemo_rl_mcore.config.base import Code as ProblemCode
from nemo_rl_mcore.config.base import ConfigError, Problem, Tree, join_path
from nemo_rl_mcore.config.data import GIVEN_TO_REWARDS, SAME_AS_GIVEN
from nemo_rl_mcore.recipe.sources import Recipe

type Reward = Callable[..., object] | str
"""A function or what else can be called, its import path, or a class with `score` or `step`."""
type Rewards = Reward | Sequence[Reward] | Mapping[str, Reward]
type Weights = Mapping[str, float] | Sequence[float]
"""The weights of reward functions: by name, 1 where there is none, or one of each in their order."""


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
        if module != "__main__" and getattr(sys.modules.get(module), name, None) is value:
            return f"{module}:{name}"
        own = getattr(value, "__name__", "")
        kept = free = f"__main__:{own if own.isidentifier() else path.rpartition('.')[2]}"
        number = 1  # of another object that has this name
        while self.objects.get(free, value) is not value:
            number += 1
            free = f"{kept}_{number}"
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
                remedy = "make what it needs inside it, or put it into a module"
                problems.append(Problem("not-supported", path, what, remedy))
        if problems:
            raise ConfigError(problems)


@dataclass
class Draft:
    """The keys that arguments set, and the argument behind each key; problems: what is wrong with arguments."""

    algorithm: str
    code: Code = field(default_factory=Code)
    tree: Tree = field(default_factory=dict[str, object])
    arguments: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[Problem] = field(default_factory=list[Problem])
    _functions: dict[str, Reward] = field(default_factory=dict[str, Reward])

    def set(self, argument: str, values: Mapping[str, object]) -> None:
        """Set keys, by their paths, and say which argument does; "": none."""
        for path, value in values.items():
            *sections, key = path.split(".")
            section = self.tree
            for name in sections:
                section = cast("Tree", section.setdefault(name, {}))
            section[key] = value
            self.arguments[path] = f"argument {argument}" if argument else "default of Python"

    def weights(self, section: str, name: object, argument: str) -> None:
        """Set the weights of a model, a folder or a name on the hub; ConfigError for a model in memory."""
        path = f"{section}.model_name"
        if not isinstance(name, str | Path):
            what = f"a {type(name).__name__} is no folder, and no name on the hub"
            remedy = "save the model and its tokenizer, by save_pretrained(FOLDER), and give the folder"
            raise ConfigError([Problem("wrong-kind", path, what, remedy, where=f"argument {argument}")])
        self.set(argument, {path: str(name)})

    def data(self, train: Data | None, validation: Data | None, folder: Path) -> None:
        """Set the sources, with the columns that reward functions take, which are set before."""
        wanted = dict.fromkeys(name for one in self._functions.values() for name in _columns_of(one))
        for key, given in (("train", train), ("validation", validation)):
            if given is None:
                continue
            source = source_of(given, folder / f"{key}.jsonl", wanted)
            if source.columns is not None:
                self._require_columns(key, source.columns)
            if key == "train" and validation is None:
                source.section.setdefault("split_validation_size", 0.0)
            self.set(key, {f"data.{key}": source.section})
            if source.is_chat:
                self.set(key, {"data.apply_chat_template": True})
        if train is None:
            self.arguments["data"] = "argument train"  # which would have set it
        else:
            self.set("train", {"data.dataset_name": "files"})

    def require_rewards(self, recipe: Mapping[str, object] | None, overrides: Sequence[str]) -> None:
        """Note that nothing says how answers are scored: a recipe without `env` scores sums."""
        given = [*(recipe or {}), *(override.lstrip("+").partition(".")[0] for override in overrides)]
        if "env" not in self.tree and "env" not in given:
            remedy = "give a function, or recipe={'env': ...}"
            self.problems.append(
                Problem("missing", "env", "nothing scores the answers", remedy, where="argument reward")
            )

    def _require_columns(self, key: str, there: Collection[str]) -> None:
        """Note each parameter of a reward function that nothing is given for."""
        known = ", ".join([*GIVEN_TO_REWARDS, *map(repr, there)])
        for name, function in self._functions.items():
            for lacking in _columns_of(function, needed=True):
                if lacking in there:
                    continue
                meant = SAME_AS_GIVEN.get(lacking)
                what = f"takes {lacking!r}, which is no column of {key}; there are {known}"
                remedy = f"call it {meant}" if meant else "name one of these"
                self.problems.append(
                    Problem("missing", f"env.rewards.{name}", what, remedy, where="argument reward")
                )

    def rewards(self, given: Rewards | None, weights: Weights | None = None) -> None:
        """Set the environment."""
        if isinstance(given, type):
            self.set("reward", {"env.custom": {"type": given}})
        elif given is not None:
            self._functions = _by_name(given)
            self.set("reward", {"env.rewards": dict(self._functions)})
        if weights is None:
            return
        if not isinstance(weights, Mapping):
            if len(weights) != len(self._functions):
                what = f"{len(weights)} weights of {len(self._functions)} reward functions"
                remedy = "give one of each, or a dict by name"
                where = "argument reward_weights"
                self.problems.append(Problem("not-allowed", "env.reward_weights", what, remedy, where=where))
            weights = dict(zip(self._functions, weights, strict=False))
        self.set("reward_weights", {"env.reward_weights": dict(weights)})

    def recipe(self, under: Mapping[str, object] | None) -> Recipe:
        """Return the recipe, with the keys of another tree over those of the arguments."""
        whole = Recipe(OmegaConf.create(), ()).under(self.code.named(self.tree), self.arguments)
        return whole.under(self.code.named(under or {}), _paths(under or {}))


def _by_name(given: Rewards) -> dict[str, Reward]:
    if isinstance(given, Mapping):
        named = [*cast("Mapping[str, Reward]", given).items()]
    else:
        alone = isinstance(given, str) or not isinstance(given, Sequence)
        several = [cast("Reward", given)] if alone else [*cast("Sequence[Reward]", given)]
        named = [(_name_of(one), one) for one in several]
    if any(not isinstance(one, str) and (isinstance(one, type) or not callable(one)) for _, one in named):
        remedy = "give functions, or one class alone, whose arguments recipe={'env': {'custom': ...}} has"
        raise _refused("not-allowed", "one of them is no function", remedy)
    if len(functions := dict(named)) < len(named):
        what = f"several have the same name: {', '.join(name for name, _ in named)}"
        raise _refused("contradicts", what, "give them by their names, as a dict")
    return functions


def _refused(code: ProblemCode, what: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(code, "env.rewards", what, remedy, where="argument reward")])


def _name_of(reward: Reward) -> str:
    if isinstance(reward, str):
        return reward.rpartition(":")[2]
    name = getattr(reward, "__name__", "reward")
    return name if name.isidentifier() else "reward"


def _columns_of(reward: Reward, *, needed: bool = False) -> list[str]:
    """Return the parameters of a function that are columns; needed: those without a default."""
    if isinstance(reward, str):
        return []
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    try:
        named = signature(reward).parameters.items()
    except ValueError:  # one that is written in C, which its first call judges
        return []
    return [
        name
        for name, one in named
        if one.kind in kinds
        and name not in GIVEN_TO_REWARDS
        and not (needed and one.default is not Parameter.empty)
    ]


def _paths(tree: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else key
        found[path] = "argument recipe"
        if isinstance(value, Mapping):
            found |= _paths(cast("Mapping[str, object]", value), path)
    return found
