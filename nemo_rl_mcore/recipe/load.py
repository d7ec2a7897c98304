"""Load a recipe: files, overrides, interpolation and validation; all problems are reported together."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rl_mcore.config.base import ConfigError, Problem, Tree, join_path, refused
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.models.pretrained import MODEL, TOKENIZER, other_tokenizer
from nemo_rl_mcore.recipe.interpolations import (
    Reference,
    References,
    as_written,
    for_our_resolvers,
    read_environment,
    read_value,
    register,
    unreadable,
    without_values,
)
from nemo_rl_mcore.recipe.of_nemo_rl import names_foreign, recipe_of_nemo_rl
from nemo_rl_mcore.recipe.sources import Recipe, apply_overrides, origins, places, read_recipe
from nemo_rl_mcore.recipe.validate import validate

Number = int | float


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Load and check a recipe; its section grpo, ppo, dpo, sft or distillation determines the algorithm.

    Overrides follow Hydra's grammar: `a.b=c`, `+new=...`, `~gone`. Raises ConfigError with every problem.

    >>> load_config("grpo_copy_cpu.yaml", ["grpo.max_num_steps=7"]).loop.max_num_steps
    7
    """
    return load_with_warnings(path, overrides)[0]


def load_with_warnings(
    path: str | Path, overrides: Iterable[str] = ()
) -> tuple[RunConfig, tuple[Problem, ...]]:
    """Load and check a recipe as `load_config` does; also return warnings."""
    return check(compute(read_recipe(path), overrides))


def load_recipe(recipe: Recipe, overrides: Iterable[str] = ()) -> RunConfig:
    return check(compute(recipe, overrides))[0]


@dataclass(frozen=True)
class Computed:
    """A recipe after overrides and interpolations: its plain tree, and the problems so far.

    overridden: keys set on the command line. references: values from the environment.
    """

    recipe: Recipe
    tree: Tree
    problems: list[Problem]
    overridden: list[str]
    references: References

    def located(self, problems: Iterable[Problem]) -> list[Problem]:
        """Return the problems with each key's location, and without values from the environment."""
        where = places(self.recipe, self.overridden)
        return [
            replace(hidden(problem, self.references), where=problem.where or where.get(problem.path, ""))
            for problem in problems
        ]


def compute(recipe: Recipe, overrides: Iterable[str]) -> Computed:
    """Apply overrides and compute interpolations."""
    overridden, problems = apply_overrides(recipe.tree, overrides, names_foreign)
    tree, unresolved, references = resolve(recipe.tree)
    # A recipe removes its parent's section by `section: null`.
    kept = {key: value for key, value in tree.items() if value is not None}
    return Computed(recipe, kept, [*problems, *unresolved], overridden, references)


def check(read: Computed, migrated: Tree | None = None) -> tuple[RunConfig, tuple[Problem, ...]]:
    """Validate a recipe, and return the configuration and warnings; raises ConfigError.

    migrated: the tree of a NeMo RL recipe after its migration; None refuses such a recipe.
    """
    if migrated is None:
        file = next(reversed(read.recipe.files), None)
        if theirs := recipe_of_nemo_rl(read.tree, file, read.overridden):
            raise ConfigError(read.located([theirs]))
    validated = validate(read.tree if migrated is None else migrated)
    # A value that could not be computed is missing from the tree and must not be reported a second time.
    known = {problem.path for problem in read.problems}
    problems = [*read.problems, *(problem for problem in validated.problems if problem.path not in known)]
    warnings, config = validated.warnings, validated.config
    policy = None if config is None else config.policy
    if policy is not None and (other := other_tokenizer(policy.model_name, policy.tokenizer.name)):
        # An error if the model's file does not set the tokenizer too, and no override sets either of them.
        named_in = {key: origin.file for key, origin in origins(read.recipe.files).items()}
        inherited = named_in.get(MODEL, -1) > named_in.get(TOKENIZER, len(named_in))
        wrong = inherited and not {MODEL, TOKENIZER} & set(read.overridden)
        (problems if wrong else warnings).append(other)
    if problems or config is None:
        raise ConfigError(read.located(problems))
    return config.refer(read.references), tuple(read.located(warnings))


def hidden(problem: Problem, references: References) -> Problem:
    """Return the problem with references in place of values from the environment."""
    paths = (problem.path, *problem.related)
    what, remedy = (without_values(text, references, *paths) for text in (problem.what, problem.remedy))
    return replace(problem, what=what, remedy=remedy)


def resolve(tree: DictConfig) -> tuple[Tree, list[Problem], dict[str, Reference]]:
    """Compute interpolations; return the plain tree, problems, and references to the environment."""
    for name, resolver in _RESOLVERS.items():
        register(name, resolver)
    written = cast("Tree", OmegaConf.to_container(tree, resolve=False))
    if problem := unreadable(written):
        raise ConfigError([problem])
    resolving = _Resolving()
    plain = resolving.section(OmegaConf.create(for_our_resolvers(written)), "")
    return plain, resolving.problems, resolving.references


_VALUES = 100_000
_DEPTH = 60


@dataclass
class _Resolving:
    """Resolver of a tree with interpolations to a plain tree."""

    problems: list[Problem] = field(default_factory=list[Problem])
    references: dict[str, Reference] = field(default_factory=dict[str, Reference])
    values: int = 0

    def section(self, section: DictConfig, prefix: str) -> Tree:
        plain: Tree = {}
        for key in cast("Iterable[str]", section):
            path = join_path(prefix, str(key))
            if OmegaConf.is_missing(section, key):
                fix = "set it, in the recipe or by an override"
                self.problems.append(Problem("missing", path, "has no value (???)", fix))
            else:
                self._put(plain, str(key), section, key, path)
        return plain

    def _put(
        self, plain: dict[str, object], name: str, parent: DictConfig | ListConfig, key: str | int, path: str
    ) -> None:
        """Compute a value, or record a problem."""
        self.values += 1
        if self.values > _VALUES or path.count(".") > _DEPTH:
            what = "refers to a section that contains it"
            raise refused("reference", path, what, "correct the reference")
        try:
            value, reference = read_value(lambda: cast("Any", parent)[key], lambda: as_written(parent, key))
            if isinstance(value, DictConfig):
                plain[name] = self.section(value, path)
            elif isinstance(value, ListConfig):
                many: Tree = {}
                for place in range(len(value)):
                    self._put(many, str(place), value, place, join_path(path, str(place)))
                plain[name] = [*many.values()]
            else:
                plain[name] = value
        except (OmegaConfBaseException, RecursionError) as error:
            reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0])
            what = f"{as_written(parent, key)} cannot be computed: {reason}"
            self.problems.append(Problem("reference", path, what, "correct the reference"))
        else:
            if reference is not None:
                self.references[path] = reference


def _divide(dividend: Number, divisor: Number) -> Number:
    """Return the quotient, as an integer if both numbers are integers and it is exact."""
    _numbers((dividend, divisor))
    if isinstance(dividend, int) and isinstance(divisor, int) and dividend % divisor == 0:
        return dividend // divisor
    return dividend / divisor


def _product(*factors: Number) -> Number:
    bits = sum(one.bit_length() for one in _numbers(factors) if isinstance(one, int))
    if bits > _BITS:
        raise ValueError(f"a product of {bits} bits")
    return math.prod(factors)


_BITS = 1024
"""Maximum bits of a product, as in a float's range."""


def _numbers(given: tuple[object, ...]) -> tuple[Number, ...]:
    """Return the operands if they are numbers; else raise ValueError, as a list times a number could be huge."""
    for one in given:
        if isinstance(one, bool) or not isinstance(one, int | float):
            raise ValueError(f"{_KINDS.get(type(one), 'a section')} is not a number")
    return cast("tuple[Number, ...]", given)


_KINDS: dict[object, str] = {bool: "a boolean", list: "a list", str: "a string", type(None): "null"}

_RESOLVERS: dict[str, Callable[..., Number | str | None]] = {
    "oc.env": read_environment,
    "add": lambda *terms: sum(_numbers(terms)),
    "mul": _product,
    "div": _divide,
    "max": lambda *values: max(_numbers(values)),
}
