"""Load a recipe: files, overrides, interpolation, validation; every problem is reported at once."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rl_mcore.config.base import ConfigError, Problem, join_path
from nemo_rl_mcore.config.foreign.judgement import Tree
from nemo_rl_mcore.config.hf.own_tokenizer import MODEL, TOKENIZER, inherited, other_tokenizer
from nemo_rl_mcore.config.master import RunConfig
from nemo_rl_mcore.config.sources import Recipe, apply_overrides, locate, origins, read_recipe
from nemo_rl_mcore.config.validate import validate

Number = int | float


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Load and check a recipe; the section of the algorithm (grpo, ppo, dpo, sft, distillation) says of which.

    Overrides follow Hydra's grammar: `a.b=c`, `+new=...`, `~gone`. Raises ConfigError with every problem.
    """
    return load_with_warnings(path, overrides)[0]


def load_with_warnings(
    path: str | Path, overrides: Iterable[str] = ()
) -> tuple[RunConfig, tuple[Problem, ...]]:
    """Load and check a recipe as `load_config` does; give also the keys that it sets in vain.

    They are NeMo RL's, and cost speed or memory alone.
    """
    return _load(read_recipe(path), overrides)


def load_recipe(recipe: Recipe, overrides: Iterable[str] = ()) -> RunConfig:
    """Check a recipe that was read; see `load_config`."""
    return _load(recipe, overrides)[0]


def _load(recipe: Recipe, overrides: Iterable[str]) -> tuple[RunConfig, tuple[Problem, ...]]:
    overridden, problems = apply_overrides(recipe.tree, overrides)
    tree, unresolved = resolve(recipe.tree)
    # A recipe drops a section of its parent by `section: null`.
    validated = validate({key: value for key, value in tree.items() if value is not None})
    # A value that could not be computed is left out of the tree: that it is missing then says nothing new.
    known = {problem.path for problem in unresolved}
    problems += [*unresolved, *(problem for problem in validated.problems if problem.path not in known)]
    warnings, config = list(validated.warnings), validated.config
    if config is not None and (
        other := other_tokenizer(config.policy.model_name, config.policy.tokenizer.name)
    ):
        (problems if _is_inherited(recipe, overridden) else warnings).append(other)
    if problems or config is None:
        raise ConfigError(locate(problems, recipe.files, overridden))
    return config, tuple(locate(warnings, recipe.files, overridden))


def _is_inherited(recipe: Recipe, overridden: Iterable[str]) -> bool:
    """Whether nobody who names the model has named the tokenizer, nor an override one of the two."""
    if {MODEL, TOKENIZER} & set(overridden):
        return False
    return inherited({key: origin.file for key, origin in origins(recipe.files).items()})


def resolve(tree: DictConfig) -> tuple[Tree, list[Problem]]:
    """Compute the interpolations; give the plain tree and what could not be computed."""
    for name, resolver in _RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    problems: list[Problem] = []
    return _resolve_section(tree, "", problems), problems


def _resolve_section(section: DictConfig, prefix: str, problems: list[Problem]) -> Tree:
    plain: Tree = {}
    for key in cast("Iterable[str]", section):
        path = join_path(prefix, str(key))
        if OmegaConf.is_missing(section, key):
            problems.append(Problem(path, "has no value (???)", "set it, in the recipe or by an override"))
            continue
        try:
            value: object = section[key]
            if isinstance(value, DictConfig):
                plain[str(key)] = _resolve_section(value, path, problems)
            elif isinstance(value, ListConfig):
                plain[str(key)] = [
                    _resolve_section(one, join_path(path, str(place)), problems)
                    if isinstance(one, DictConfig)
                    else OmegaConf.to_container(one, resolve=True)
                    if isinstance(one, ListConfig)
                    else one
                    for place, one in enumerate(value)
                ]
            else:
                plain[str(key)] = value
        except (OmegaConfBaseException, RecursionError) as error:
            written = cast("Tree", OmegaConf.to_container(section, resolve=False))[key]
            reason = str(error).splitlines()[0]
            problems.append(Problem(path, f"{written} cannot be computed: {reason}", "correct the reference"))
    return plain


def _divide(dividend: Number, divisor: Number) -> Number:
    """A quotient of integers stays one where it can, so that it may fill an integer key."""
    if isinstance(dividend, int) and isinstance(divisor, int) and dividend % divisor == 0:
        return dividend // divisor
    return dividend / divisor


def _product(*factors: Number) -> Number:
    return math.prod(factors)


def _sum(*terms: Number) -> Number:
    return sum(terms)


def _largest(*values: Number) -> Number:
    return max(values)


_RESOLVERS: dict[str, Callable[..., Number]] = {
    "add": _sum,
    "mul": _product,
    "div": _divide,
    "max": _largest,
}
