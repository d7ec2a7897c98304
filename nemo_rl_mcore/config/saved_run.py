"""The recipe that stands in a checkpoint, and what a run that goes on from there has changed."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import yaml
from pydantic import ValidationError

from nemo_rl_mcore.config.base import DEFER, Problem, join_path
from nemo_rl_mcore.config.load import load_config
from nemo_rl_mcore.config.master import RunConfig
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.pretrained import OF_TRAINING, explicit_fields
from nemo_rl_mcore.config.sources import read_recipe

RECIPE_FILE = "config.yaml"

Tree = Mapping[str, object]

_WITHOUT_EFFECT = ("checkpointing", "logger", "policy.init_checkpoint", "policy.model_name")
"""What a run leaves behind, and the weights that the checkpoint has replaced."""
_OF_THE_STATE = ("policy.precision", "policy.megatron_cfg.optimizer.optimizer")
"""What decides which tensors a checkpoint holds, besides the architecture."""
_NOT_IN_WEIGHTS = OF_TRAINING | {"max_position_embeddings"}


@dataclass(frozen=True)
class Change:
    """A key whose value is not the one that the checkpoint was saved under."""

    path: str
    was: object
    now: object

    def __str__(self) -> str:
        return f"{self.path}: {_shown(self.now)} (was {_shown(self.was)})"


def recipe_text(config: RunConfig) -> str:
    """The resolved recipe as YAML, to be saved; it loads again to the same configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def load_recipe_of(folder: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The configuration of a run that starts from a checkpoint's weights, by its own recipe; raises ConfigError."""
    # What the run itself began with, or learned from, may be gone by now.
    without = ["policy.model_name=null", "warm_start=null"]
    if "teacher" in read_recipe(folder / RECIPE_FILE).tree:
        without += ["teacher.warm_start=null", "teacher.model_name=null", "teacher.init_checkpoint=none"]
    config = load_config(folder / RECIPE_FILE, [*without, *overrides])
    policy = config.policy.model_copy(update={"init_checkpoint": str(folder.absolute())})
    return config.model_copy(update={"policy": policy})


def read_recipe_of(folder: Path) -> Tree:
    """The recipe in a checkpoint's folder; raises ValueError when there is none."""
    path = folder / RECIPE_FILE
    try:
        recipe: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{str(folder)!r} is no checkpoint: {path} cannot be read: {reason}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{str(folder)!r} is no checkpoint: {path} holds no recipe")
    return cast("Tree", recipe)


def changes_since(saved: Tree, config: RunConfig) -> list[Change]:
    """What changes the result of a run that was saved under `saved` and goes on under `config`."""
    before, after = dict(_leaves(saved, "")), dict(_leaves(config.model_dump(mode="json"), ""))
    return [
        Change(path, before.get(path), after.get(path))
        for path in {**after, **before}
        if before.get(path) != after.get(path) and not _below(path, _WITHOUT_EFFECT)
    ]


def does_not_fit(saved: Tree, policy: PolicyConfig) -> list[str]:
    """In which fields the architecture of a saved policy is not that of `policy`."""
    section = saved.get("policy")
    model = cast("Tree", section).get("model") if isinstance(section, dict) else None
    try:
        theirs = explicit_fields(ModelConfig.model_validate(model, context=DEFER))
    except ValidationError as error:
        return [f"its policy.model cannot be read: {error.error_count()} wrong fields"]
    ours = explicit_fields(policy.model)
    return [
        str(Change(f"policy.model.{key}", theirs[key], ours[key]))
        for key in theirs
        if key not in _NOT_IN_WEIGHTS and ours[key] != theirs[key]
    ]


def cannot_resume(saved: Tree, config: RunConfig) -> list[str]:
    """What of the recipe would have to be as it was saved for the policy's state to be loaded."""
    of_the_state = [
        str(change) for change in changes_since(saved, config) if _below(change.path, _OF_THE_STATE)
    ]
    return does_not_fit(saved, config.policy) + of_the_state


def init_checkpoint_problems(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield what stops policy.init_checkpoint from being loaded, as far as its recipe tells."""
    if policy.init_checkpoint is None:
        return
    remedy = "name a folder step_N of a run with this architecture"
    try:
        differing = does_not_fit(read_recipe_of(Path(policy.init_checkpoint)), policy)
    except ValueError as error:
        yield Problem("policy.init_checkpoint", str(error), remedy)
        return
    if differing:
        what = f"{policy.init_checkpoint!r} holds another model: {', '.join(differing)}"
        yield Problem("policy.init_checkpoint", what, remedy)


def _leaves(tree: Tree, prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        path = join_path(prefix, key)
        if isinstance(value, dict) and value:
            yield from _leaves(cast("Tree", value), path)
        else:
            yield path, value


def _below(path: str, sections: tuple[str, ...]) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
