"""The recipe that stands in a checkpoint, and what a run that goes on from there has changed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from nemo_rl_mcore.config.base import Problem, absolute_path, join_path
from nemo_rl_mcore.config.master import kind_of
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.run_models import ModelPlan
from nemo_rl_mcore.errors import shortened
from nemo_rl_mcore.models.pretrained import OF_TRAINING, explicit_fields
from nemo_rl_mcore.recipe.environment_values import value_now
from nemo_rl_mcore.recipe.yaml_text import read_yaml_text

RECIPE_FILE = "config.yaml"
TOKENIZER_FOLDER = "tokenizer"

Tree = Mapping[str, object]

_WITHOUT_EFFECT = (
    *("checkpointing", "logger", "env.pool", "policy.init_checkpoint", "policy.model_name"),
    *("env.endpoint.processes", "env.endpoint.port", "env.endpoint.gym"),
    "policy.generation.journal",  # a key of earlier versions
    "input_digests",
)
"""What a run leaves behind, where answers are scored, and the weights that the checkpoint has replaced."""
_ENDINGS_WITHOUT_EFFECT = ("_timeout_s", ".keep_groups", ".keep_groups_gb")
"""How long the driver, ranks and engines wait for each other, and what is left for a replay."""
_OF_THE_STATE = (
    *("policy.precision", "policy.megatron_cfg.optimizer.optimizer"),
    *("policy.megatron_cfg.freeze", "policy.megatron_cfg.freeze_moe_router"),
)
"""What decides which tensors the checkpoint of a model holds, besides the architecture."""
_OF_THE_ANSWERS = (
    *(
        f"policy.generation.{key}"
        for key in (
            *("temperature", "top_p", "top_k", "max_new_tokens", "fit_to_sequence"),
            *("stop_token_ids", "stop_strings"),
        )
    ),
    "policy.max_total_sequence_length",
    "env",
)
_MAX_TURNS, _MAX_AGE, _ORDER = "max_rollout_turns", "max_trajectory_age_steps", "order"
_NOT_IN_WEIGHTS = OF_TRAINING | {"max_position_embeddings"}


@dataclass(frozen=True)
class Change:
    """A key whose value is not the one that the checkpoint was saved under."""

    path: str
    was: object
    now: object

    def __str__(self) -> str:
        return f"{self.path}: {shown_value(self.now)} (was {shown_value(self.was)})"


def recipe_text(config: RunConfig) -> str:
    """Return the resolved recipe as YAML, to be saved; it loads again to the same configuration, in any directory.

    What it takes from the environment stays a reference.
    """
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def read_recipe_of(folder: Path) -> Tree:
    """Return the recipe in a checkpoint's folder; raises ValueError when there is none, as `recipe_text` writes it."""
    path = folder / RECIPE_FILE
    try:
        recipe: object = yaml.safe_load(read_yaml_text(path, follow_links=False, aliases=False))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = shortened(" ".join(str(error).split()), 300)
        raise ValueError(f"{str(folder)!r} is no checkpoint: {path} cannot be read: {reason}") from error
    if not isinstance(recipe, dict) or "defaults" in recipe:
        raise ValueError(f"{str(folder)!r} is no checkpoint: {path} holds no recipe")
    return cast("Tree", recipe)


def changes_since(saved: Tree, config: RunConfig) -> list[Change]:
    """Return what changes the result of a run that was saved under `saved` and goes on under `config`."""
    before, after, shown = (
        dict(leaves(tree)) for tree in (saved, config.plain(), config.model_dump(mode="json"))
    )
    inputs_before, inputs = _inputs(saved), config.input_digests or {}

    def changed(path: str) -> Change | None:
        was, now = before.get(path), after.get(path)
        if path in inputs and path in inputs_before:
            same = inputs[path] == inputs_before[path]
            if not same and was == now:
                return Change(path, inputs_before[path], inputs[path])
        elif isinstance(was, str) and "${" in was:  # what the environment gave then, nobody knows
            same = was == shown.get(path) or value_now(was) == str(now)
        else:
            new = path not in before and now == _default_of(config, path)
            same = new or _same(path, was, now)
        hidden = shown.get(path) != now
        return None if same else Change(path, "another value" if hidden else was, shown.get(path))

    inside = tuple(f"{path}." for path, was in before.items() if isinstance(was, str) and "${" in was)
    paths = (
        path
        for path in {**after, **before, **inputs}
        if not _has_no_effect(path) and not path.startswith(inside)
    )
    return [change for path in paths if (change := changed(path)) is not None]


def _inputs(saved: Tree) -> dict[str, str]:
    """Return the digests of what a run read; of one of an earlier version, none."""
    found = saved.get("input_digests")
    return {str(key): str(one) for key, one in cast("Tree", found).items()} if isinstance(found, dict) else {}


def bounds_of(config: RunConfig) -> tuple[str, ...]:
    """Return the keys that say how long a run goes on: they change nothing of the steps that are behind it."""
    return tuple(f"{config.algorithm}.{key}" for key in ("max_num_steps", "max_num_epochs"))


def _default_of(config: RunConfig, path: str) -> object:
    """Return the default of a key as JSON has it: an earlier version, which had no such key, ran as with that."""
    *sections, name = path.split(".")
    section: object = config
    for key in sections:
        section = getattr(section, key, None)
    field = type(section).model_fields.get(name) if isinstance(section, BaseModel) else None
    return (
        to_jsonable_python(field.get_default(call_default_factory=True, validated_data={})) if field else None
    )


def _same(path: str, was: object, now: object) -> bool:
    """Return whether a value is the saved one; a checkpoint from before may hold a folder's path as it was written."""
    named = path.rpartition(".")[2] in ("model_name", "init_checkpoint") or path.endswith("tokenizer.name")
    return was == now or (named and isinstance(was, str) and absolute_path(was) == now)


def changes_of_answers(saved: Tree, config: RunConfig) -> list[Change]:
    """Those by which saved answers are none of the run: how they are drawn and scored, and how old they may be."""
    changes = changes_since(saved, config)
    turns = f"{config.algorithm}.{_MAX_TURNS}"
    drawn = [change for change in changes if _below(change.path, (*_OF_THE_ANSWERS, turns))]
    max_age, order = (f"{config.asynchrony_key}.{key}" for key in (_MAX_AGE, _ORDER))
    older = [one for one in changes if one.path == max_age and not _at_least(one.now, one.was)]
    return drawn + older + [one for one in changes if one.path == order]


def _at_least(now: object, was: object) -> bool:
    return isinstance(now, int) and isinstance(was, int) and now >= was


def _has_no_effect(path: str) -> bool:
    return _below(path, _WITHOUT_EFFECT) or path.endswith(_ENDINGS_WITHOUT_EFFECT)


def does_not_fit(saved: Tree, plan: ModelPlan) -> list[str]:
    """In which fields the architecture of a saved policy is not that of a model of the run."""
    section = saved.get("policy")
    model = cast("Tree", section).get("model") if isinstance(section, dict) else None
    try:
        theirs = explicit_fields(ModelConfig.model_validate(model))
    except ValidationError as error:
        return [f"its policy.model cannot be read: {error.error_count()} wrong fields"]
    ours = explicit_fields(plan.policy.model)
    return [
        str(Change(plan.key(f"policy.model.{key}"), theirs[key], ours[key]))
        for key in theirs
        if key not in _NOT_IN_WEIGHTS and ours[key] != theirs[key]
    ]


def cannot_resume(saved: Tree, config: RunConfig) -> str | None:
    """Return why a run cannot go on from what was saved under another recipe, and the way out; None where it can."""
    before = kind_of(saved).algorithm
    if before != config.algorithm:
        return (
            f"was saved by a run of {before}, and this is one of {config.algorithm}; name another "
            "checkpointing.checkpoint_dir (policy.init_checkpoint takes the weights alone)"
        )
    trained = [plan for plan in config.models.values() if plan.trained]
    of_the_state = tuple(plan.key(path) for plan in trained for path in _OF_THE_STATE)
    misfits = [misfit for plan in trained for misfit in does_not_fit(saved, plan)]
    misfits += [str(change) for change in changes_since(saved, config) if _below(change.path, of_the_state)]
    if not misfits:
        return None
    return (
        f"was saved under another policy: {', '.join(dict.fromkeys(misfits))}; set it back, or name another "
        "checkpointing.checkpoint_dir"
    )


def init_checkpoint_problems(plan: ModelPlan) -> Iterator[Problem]:
    """Yield what stops a model's init_checkpoint from being loaded, as far as its recipe tells."""
    folder = plan.policy.init_checkpoint
    if folder is None:
        return
    key, remedy = plan.key("policy.init_checkpoint"), "name a folder step_N of a run with this architecture"
    try:
        differing = does_not_fit(read_recipe_of(Path(folder)), plan)
    except ValueError as error:
        yield Problem("not-readable", key, str(error), remedy)
        return
    if differing:
        yield Problem("other-model", key, f"{folder!r} holds another model: {', '.join(differing)}", remedy)


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values of a recipe with their paths; lists and empty sections are values."""
    for key, value in tree.items():
        path = join_path(prefix, key)
        if isinstance(value, dict) and value:
            yield from leaves(cast("Tree", value), path)
        else:
            yield path, value


def _below(path: str, sections: tuple[str, ...]) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)


def shown_value(value: object) -> str:
    """Return a value as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
