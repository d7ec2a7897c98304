"""A recipe under construction: keys set by arguments, their origin for messages, and code objects in the recipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from inspect import Parameter, signature
from itertools import islice
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from nemo_rl_mcore.config.base import Code as ProblemCode
from nemo_rl_mcore.config.base import ConfigError, Problem, Tree, join_path, refused
from nemo_rl_mcore.config.data import GIVEN_TO_REWARDS, SAME_AS_GIVEN
from nemo_rl_mcore.driver.run_folder import replacing
from nemo_rl_mcore.recipe.sources import Recipe, key_paths

PROMPT_NAMES = ("input", "prompt", "question", "problem", "query", "instruction")
ANSWER_NAMES = ("output", "answer", "solution", "completion", "response", "expected_answer", "ground_truth")
"""Column names recognised as the prompt and its answer, in order of precedence."""
_CONVERSATIONS = ("messages", "chosen")

type Data = str | Path | Mapping[str, object] | Iterable[Mapping[str, object]]
"""A file, a folder or a hub id; a section like a recipe's `data.train`; or rows, as a list or `Dataset`."""


@dataclass(frozen=True)
class Source:
    """A source's section; columns: those available to reward functions, None if unknown before the data is read."""

    section: Tree
    columns: Collection[str] | None = None
    is_chat: bool = False


def source_of(given: Data, file: Path, wanted: Collection[str] = ()) -> Source:
    """Return a source's section for a recipe.

    Rows in memory are written to a file named like `file`, in a separate folder next to it. The first row determines
    the columns. wanted: columns that reward functions take, kept if they exist. Raises ConfigError if there are no
    rows, or rows without a prompt.
    """
    argument = file.stem
    if isinstance(given, Mapping):
        section = dict(cast("Mapping[str, object]", given))
        if splits := [name for name, one in section.items() if hasattr(one, "column_names")]:
            what = f"a {type(cast('object', given)).__name__} of {', '.join(splits)}, and a source is one of these"
            raise _refused("wrong-kind", argument, "", what, f"give one: {argument}=...[{splits[0]!r}]")
        return Source(section, cast("Sequence[str]", section.get("columns", ())))
    if isinstance(given, str | Path):
        path, first = Path(given), None
        place = str(path.absolute()) if path.exists() else str(given)
        if path.suffix == ".jsonl" and path.is_file():  # other formats have given or default columns
            with path.open(encoding="utf-8") as lines:
                line = next((line for line in lines if line.strip()), "{}")
            with suppress(ValueError):  # the reader reports the error
                row = json.loads(line)
                first = cast("Mapping[str, object]", row) if isinstance(row, dict) else None
    else:
        is_frame = hasattr(given, "iterrows")  # a pandas frame iterates over column names
        rows = cast("Any", given).to_dict("records") if is_frame else [*given]
        if not rows:
            raise _refused("too-few-rows", argument, "", "no rows", "give at least one")
        first, lines = rows[0], list[bytes]()
        for number, row in enumerate(rows, start=1):
            try:
                line = json.dumps(dict(row), ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError) as error:
                what = f"row {number} cannot be written as JSON: {error}"
                raise _refused("wrong-row", argument, "", what, "give text, numbers and lists") from error
            lines.append(f"{line}\n".encode())
        # The folder's name is their digest, so that an earlier run's rows remain.
        written = file.absolute().with_name(sha256(b"".join(lines)).hexdigest()[:12]) / file.name
        place = str(written)
        if not written.is_file():
            written.parent.mkdir(parents=True, exist_ok=True)
            with replacing(written) as stream:
                stream.writelines(lines)
    section: Tree = {"data_path": place}
    if first is None:
        return Source(section)
    prompts = (first[name] for name in (*PROMPT_NAMES, *_CONVERSATIONS) if name in first)
    is_chat = any(isinstance(prompt, list) for prompt in islice(prompts, 1))
    return Source(section | _columns(first, wanted, argument), [*first], is_chat)


def _refused(code: ProblemCode, argument: str, key: str, what: str, remedy: str) -> ConfigError:
    return refused(code, join_path(f"data.{argument}", key), what, remedy, f"argument {argument}")


def _columns(first: Mapping[str, object], wanted: Collection[str], argument: str) -> Tree:
    """Return the keys that name a row's columns, where the names differ from a recipe's defaults."""
    found: Tree = {}
    if kept := [name for name in wanted if name in first]:
        found["columns"] = kept
    if "messages" in first or "chosen" in first:
        return found
    prompt = next((name for name in PROMPT_NAMES if name in first), None)
    if prompt is None:
        there = ", ".join(map(repr, first)) or "none"
        what = f"no column is the prompt; it has {there}"
        remedy = f"call it {PROMPT_NAMES[1]}, or name it: {argument}={{'data_path': ..., 'input_key': ...}}"
        if "text" in first:
            what = f"{what}; whole texts, as of a column `text`, are not trained on"
            remedy = f"part each into prompt and completion, or into messages; or {remedy}"
        raise _refused("missing", argument, "input_key", what, remedy)
    answer = next((name for name in ANSWER_NAMES if name in first), None)
    return found | {"input_key": prompt, "output_key": answer}


type Reward = Callable[..., object] | str
"""A function or other callable, its import path, or a class with `score` or `step`."""
type Rewards = Reward | Sequence[Reward] | Mapping[str, Reward]
type Weights = Mapping[str, float] | Sequence[float]
"""Weights of reward functions: by name, with a default of 1, or in the functions' order."""


@dataclass
class Code:
    """A run's code objects that no other process could import, by their import path in the recipe."""

    objects: dict[str, object] = field(default_factory=dict[str, object])

    def named(self, value: object, path: str = "") -> object:
        """Return a recipe with import paths in place of all classes and callables."""
        if isinstance(value, Mapping):
            tree = cast("Mapping[str, object]", value)
            return {key: self.named(one, join_path(path, key)) for key, one in tree.items()}
        if not callable(value):
            return value
        module, name = (str(getattr(value, attribute, "")) for attribute in ("__module__", "__qualname__"))
        if module != "__main__" and getattr(sys.modules.get(module), name, None) is value:
            return f"{module}:{name}"
        own = getattr(value, "__name__", "")
        kept = free = f"__main__:{own if own.isidentifier() else path.rpartition('.')[2]}"
        number = 1  # until the name is free
        while self.objects.get(free, value) is not value:
            number += 1
            free = f"{kept}_{number}"
        self.objects[free] = value
        return free

    def require_portable(self) -> None:
        """Raise ConfigError for code that cannot be sent to another process, for example because of an open file."""
        from ray import cloudpickle

        problems = list[Problem]()
        for path, value in self.objects.items():
            try:
                cast("Any", cloudpickle).dumps(value)
            except Exception as error:  # noqa: BLE001 any error may occur in pickling
                what = f"cannot be sent to another process: {type(error).__name__}: {error}"
                remedy = "make what it needs inside it, or put it into a module"
                problems.append(Problem("not-supported", path, what, remedy))
        if problems:
            raise ConfigError(problems)


@dataclass
class Draft:
    """Keys set by arguments, with the argument for each key; problems: problems of arguments."""

    algorithm: str
    code: Code = field(default_factory=Code)
    tree: Tree = field(default_factory=dict[str, object])
    arguments: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[Problem] = field(default_factory=list[Problem])
    _functions: dict[str, Reward] = field(default_factory=dict[str, Reward])

    def set(self, argument: str, values: Mapping[str, object]) -> None:
        """Set keys by path and record the argument that sets them; "" records none."""
        for path, value in values.items():
            *sections, key = path.split(".")
            section = self.tree
            for name in sections:
                section = cast("Tree", section.setdefault(name, {}))
            section[key] = value
            self.arguments[path] = f"argument {argument}" if argument else "default of Python"

    def weights(self, section: str, name: object, argument: str) -> None:
        """Set a model's weights, a folder or hub id; raises ConfigError for a model in memory."""
        path = f"{section}.model_name"
        if not isinstance(name, str | Path):
            what = f"a {type(name).__name__} is neither a folder nor a name on the hub"
            remedy = "save the model and its tokenizer, by save_pretrained(FOLDER), and give the folder"
            raise refused("wrong-kind", path, what, remedy, f"argument {argument}")
        self.set(argument, {path: str(name)})

    def data(self, train: Data | None, validation: Data | None, folder: Path) -> None:
        """Set the sources, with the columns of the reward functions, which must be set before."""
        functions = self._functions
        wanted = dict.fromkeys(name for one in functions.values() for name in _columns_of(one))
        needed = [(name, one) for name in functions for one in _columns_of(functions[name], needed=True)]
        for key, given in (("train", train), ("validation", validation)):
            if given is None:
                continue
            source = source_of(given, folder / f"{key}.jsonl", wanted)
            there = source.columns
            for name, lacking in [] if there is None else [pair for pair in needed if pair[1] not in there]:
                known = ", ".join([*GIVEN_TO_REWARDS, *map(repr, there or ())])
                what = f"takes {lacking!r}, which is not a column of {key}; there are {known}"
                meant, where = SAME_AS_GIVEN.get(lacking), "argument reward"
                remedy = f"call it {meant}" if meant else "name one of these"
                self.problems.append(Problem("missing", f"env.rewards.{name}", what, remedy, where=where))
            if key == "train" and validation is None:
                source.section.setdefault("split_validation_size", 0.0)
            self.set(key, {f"data.{key}": source.section})
            if source.is_chat:
                self.set(key, {"data.apply_chat_template": True})
        if train is None:
            self.arguments["data"] = "argument train"  # which normally sets it
        else:
            self.set("train", {"data.dataset_name": "files"})

    def rewards(self, given: Rewards | None, weights: Weights | None, *, required: bool) -> None:
        """Set the rewards; required: record a problem if there are none, since recipes without `env` score sums."""
        if isinstance(given, type):
            self.set("reward", {"env.custom": {"type": given}})
        elif given is not None:
            self._functions = _by_name(given)
            self.set("reward", {"env.rewards": dict(self._functions)})
        elif required:
            what, remedy = "nothing scores the answers", "give a function, or recipe={'env': ...}"
            self.problems.append(Problem("missing", "env", what, remedy, where="argument reward"))
        if weights is None:
            return
        if not isinstance(weights, Mapping):
            if len(weights) != len(self._functions):
                what = f"{len(weights)} weights of {len(self._functions)} reward functions"
                remedy, where = "give one of each, or a dict by name", "argument reward_weights"
                self.problems.append(Problem("not-allowed", "env.reward_weights", what, remedy, where=where))
            weights = dict(zip(self._functions, weights, strict=False))
        self.set("reward_weights", {"env.reward_weights": dict(weights)})

    def recipe(self, under: Mapping[str, object] | None) -> Recipe:
        """Return the recipe, in which `under` takes precedence over the arguments' keys."""
        own, others = (cast("Tree", self.code.named(tree)) for tree in (self.tree, under or {}))
        whole = Recipe(OmegaConf.create(), ()).under(own, self.arguments)
        return whole.under(others, dict.fromkeys(key_paths(under or {}), "argument recipe"))


def _by_name(given: Rewards) -> dict[str, Reward]:
    if isinstance(given, Mapping):
        named = [*cast("Mapping[str, Reward]", given).items()]
    else:
        alone, named = isinstance(given, str) or not isinstance(given, Sequence), list[tuple[str, Reward]]()
        for one in [cast("Reward", given)] if alone else cast("Sequence[Reward]", given):
            name = one.rpartition(":")[2] if isinstance(one, str) else getattr(one, "__name__", "reward")
            named.append((name if isinstance(one, str) or name.isidentifier() else "reward", one))
    key, where = "env.rewards", "argument reward"
    if any(not isinstance(one, str) and (isinstance(one, type) or not callable(one)) for _, one in named):
        remedy = "give functions, or one class alone, whose arguments recipe={'env': {'custom': ...}} has"
        raise refused("not-allowed", key, "one of them is not a function", remedy, where)
    if len(dict(named)) < len(named):
        what = f"several have the same name: {', '.join(name for name, _ in named)}"
        raise refused("contradicts", key, what, "give them by their names, as a dict", where)
    return dict(named)


def _columns_of(reward: Reward, *, needed: bool = False) -> list[str]:
    """Return a reward function's parameters that are columns; needed: only parameters without a default."""
    if isinstance(reward, str):
        return []
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    try:
        named = signature(reward).parameters.items()
    except ValueError:  # a function in C, checked by its first call
        return []
    columns = [
        (name, one.default) for name, one in named if one.kind in kinds and name not in GIVEN_TO_REWARDS
    ]
    return [name for name, default in columns if not needed or default is Parameter.empty]
