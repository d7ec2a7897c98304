"""A recipe under construction: what an argument sets, and where that is told from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from math import gcd
from pathlib import Path
from typing import cast

from omegaconf import OmegaConf

from nemo_rl_mcore.api.code import Code
from nemo_rl_mcore.api.rows import Data, source_of
from nemo_rl_mcore.config.base import Code as ProblemCode
from nemo_rl_mcore.config.base import ConfigError, Problem, Tree
from nemo_rl_mcore.config.data import GIVEN_TO_REWARDS, SAME_AS_GIVEN
from nemo_rl_mcore.models.pretrained import read_hf_config
from nemo_rl_mcore.recipe.sources import Recipe
from nemo_rl_mcore.tools.check.gpus import visible_gpus

type Reward = Callable[..., object] | str
"""A function or what else can be called, its import path, or a class with `score` or `step`."""
type Rewards = Reward | Sequence[Reward] | Mapping[str, Reward]
type Weights = Mapping[str, float] | Sequence[float]
"""The weights of reward functions: by name, 1 where there is none, or one of each in their order."""

_LONGEST = 1024
"""Tokens of prompt and answer together, where the model has room for them."""
_ROWS = 4
"""Of a microbatch, at most."""


@dataclass
class Draft:
    """The keys that arguments set, and the argument behind each key; problems: what is wrong with arguments."""

    algorithm: str
    code: Code = field(default_factory=Code)
    tree: Tree = field(default_factory=dict[str, object])
    arguments: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[Problem] = field(default_factory=list[Problem])
    _functions: dict[str, Reward] = field(default_factory=dict[str, Reward])

    def set(self, path: str, value: object, argument: str = "") -> None:
        """Set a key, and say which argument does."""
        section, *_, key = self.tree, *path.split(".")
        for name in path.split(".")[:-1]:
            section = cast("Tree", section.setdefault(name, {}))
        section[key] = value
        self.arguments[path] = f"argument {argument}" if argument else "default of Python"

    def model(self, name: str | Path | None, max_length: int | None, max_new_tokens: int | None) -> None:
        """Set the model, and how long its sequences are."""
        longest = max_length or _LONGEST
        if name is not None:
            self.weights("policy", name, "model")
            if max_length is None:
                longest = min(longest, _positions(str(name)))
        self.set("policy.max_total_sequence_length", longest, "max_length")
        self.set("policy.generation.max_new_tokens", max_new_tokens or longest, "max_new_tokens")
        self.set("policy.generation.fit_to_sequence", max_new_tokens is None, "max_new_tokens")

    def weights(self, section: str, name: object, argument: str) -> None:
        """Set the weights of a model, a folder or a name on the hub; ConfigError for a model in memory."""
        path = f"{section}.model_name"
        if not isinstance(name, str | Path):
            what = f"a {type(name).__name__} is no folder, and no name on the hub"
            remedy = "save the model and its tokenizer, by save_pretrained(FOLDER), and give the folder"
            raise ConfigError([Problem("wrong-kind", path, what, remedy, where=f"argument {argument}")])
        self.set(path, str(name), argument)

    def machine(self, gpus: int | None) -> None:
        """Set the ranks: one on each GPU, or one on the CPU."""
        count = visible_gpus() if gpus is None else gpus
        self.set("cluster.gpus_per_node", count, "gpus")
        self.set("policy.precision", "bfloat16" if count else "float32", "gpus")

    def batch(self, rows: int, argument: str, answers: int = 1) -> None:
        """Set the samples of a step, all in one optimizer step; answers: to each row."""
        ranks = cast("Tree", self.tree["cluster"])["gpus_per_node"]
        if not all(isinstance(one, int) for one in (rows, answers, ranks)):
            return  # each is reported by its own key
        self._samples(rows * answers, max(1, cast("int", ranks)), argument)

    def _samples(self, samples: int, ranks: int, argument: str) -> None:
        self.set("policy.train_global_batch_size", samples, argument)
        rows = gcd(max(1, samples // ranks), _ROWS)
        self.set("policy.train_micro_batch_size", rows)
        self.set("policy.logprob_batch_size", rows)

    def loop(self, steps: int | None, epochs: int, validation: bool, *, answers: bool) -> None:
        """Set how long the run is, and its validations; answers: whether a validation has answers to score."""
        self.set(f"{self.algorithm}.max_num_steps", 1_000_000 if steps is None else steps, "steps")
        self.set(f"{self.algorithm}.max_num_epochs", epochs if steps is None else 1_000_000, "epochs")
        for key in ("val_at_start", "val_at_end"):
            self.set(f"{self.algorithm}.{key}", validation, "validation")
        if validation and not answers:
            self.set(f"{self.algorithm}.max_val_samples", 0, "validation")

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
            self.set(f"data.{key}", source.section, key)
            if source.is_chat:
                self.set("data.apply_chat_template", True, key)
        if train is None:
            self.arguments["data"] = "argument train"  # which would have set it
        else:
            self.set("data.dataset_name", "files", "train")

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
            self.set("env.custom", {"type": given}, "reward")
        elif given is not None:
            self._functions = _by_name(given)
            self.set("env.rewards", dict(self._functions), "reward")
        if weights is not None:
            self.set("env.reward_weights", self._weights_by_name(weights), "reward_weights")

    def _weights_by_name(self, weights: Weights) -> dict[str, float]:
        if isinstance(weights, Mapping):
            return dict(weights)
        if len(weights) != len(self._functions):
            what = f"{len(weights)} weights of {len(self._functions)} reward functions"
            remedy = "give one of each, or a dict by name"
            where = "argument reward_weights"
            self.problems.append(Problem("not-allowed", "env.reward_weights", what, remedy, where=where))
        return dict(zip(self._functions, weights, strict=False))

    def saved_in(self, out: str | Path, resume: str | Path) -> None:
        """Set the folder of the run, in which it saves its steps, and whether the same call resumes it."""
        self.set("logger.log_dir", str(out), "out")
        self.set("checkpointing.enabled", True, "out")
        self.set("checkpointing.checkpoint_dir", str(Path(out) / "checkpoints"), "out")
        self.set("checkpointing.keep_top_k", 1)
        self.set("checkpointing.resume", str(resume), "resume")

    def recipe(self, under: Mapping[str, object] | None) -> Recipe:
        """Return the recipe, with the keys of another tree over those of the arguments."""
        whole = Recipe(OmegaConf.create(), ()).under(self.code.named(self.tree), self.arguments)
        return whole.under(self.code.named(under or {}), _paths(under or {}))


def _positions(name: str) -> int:
    try:
        config = read_hf_config(name)
    except ConfigError:
        return _LONGEST  # reported when the recipe is checked
    positions = None if config is None else config.get("max_position_embeddings")
    return positions if isinstance(positions, int) else _LONGEST


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
