"""NeMo RL keys that are read under another name: async_rl, which of GRPO alone is async_grpo here, and keys that moved.

What async_rl asks for besides stands in the table of unsupported keys, or is unknown.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast

from nemo_rl_mcore.config.base import Problem, Tree, join_path, value_at
from nemo_rl_mcore.recipe.foreign.judgement import is_known_of, shown

_FOREIGN = "async_rl"
_OWN = "grpo.async_grpo"
BUFFER = "async_rl.max_buffered_rollouts"
"""Compared with what may be under way, and read no further."""
_MODEL = "policy.model"

_SAMPLER = "async_rl.sampler.name"
_ORDERS = {"in_order": "in_order", "weight_fifo": "in_order", "ready_first": "as_completed"}
"""The order of consumption that each sampler is. `windowed` answers more than it trains on, and discards by age."""
_ASYNC: dict[str, str] = {
    _SAMPLER: "grpo.async_grpo.order",
    "async_rl.sampler.max_lookahead_versions": "grpo.async_grpo.max_trajectory_age_steps",
    "async_rl.sampler.max_staleness_versions": "grpo.async_grpo.max_trajectory_age_steps",
    "async_rl.in_flight_weight_updates": "grpo.async_grpo.in_flight_weight_updates",
    "async_rl.recompute_kv_cache_after_weight_updates": "grpo.async_grpo.recompute_kv_cache_after_weight_updates",
    "async_rl.min_groups_for_streaming_train": "grpo.async_grpo.min_groups_for_streaming_train",
    "async_rl.max_inflight_prompts": "grpo.async_grpo.max_inflight_prompts",
    "async_rl.rollout_timeout_s": "grpo.async_grpo.rollout_timeout_s",
}
_OF_EXPERTS: dict[str, str] = {
    f"policy.megatron_cfg.{key}": f"policy.model.{key}"
    for key in (
        *("moe_router_dtype", "moe_router_load_balancing_type", "moe_router_bias_update_rate"),
        "moe_aux_loss_coeff",
    )
}
"""Read where the model has experts; the third, where they are balanced by a bias."""
_MOVED: dict[str, str] = {
    "ppo.policy_training_start_step": "ppo.critic_warmup_steps",
    "env.math.num_workers": "env.pool.size",
}
TRANSLATED: dict[str, str] = {
    **_ASYNC,
    **_OF_EXPERTS,
    **_MOVED,
    "value.megatron_cfg.optimizer": "value.optimizer",
    "value.megatron_cfg.scheduler": "value.scheduler",
}
"""The key that is read for each of NeMo RL's."""

_DEFAULT_LOOKAHEAD = 1
"""Of max_lookahead_versions there, and of max_trajectory_age_steps here."""


@dataclass
class Translation:
    """A recipe in our own keys, what is wrong with the foreign ones, and which of those gave which of ours.

    dropped: foreign keys that say nothing of this recipe.
    """

    tree: Tree
    problems: list[Problem] = field(default_factory=list[Problem])
    origins: dict[str, str] = field(default_factory=dict[str, str])
    dropped: list[str] = field(default_factory=list[str])


def translate(tree: Tree, algorithm: str, written: Tree) -> Translation:
    """Move keys to the names they have here; `written` is the recipe before anything was filled in.

    What async_rl asks for goes into grpo.async_grpo; a null section is none, as in NeMo RL.
    """
    result = Translation({key: value for key, value in tree.items() if key != _FOREIGN})
    for source, target in {**_OF_EXPERTS, **_MOVED}.items():
        _move(source, target, written, result)
    loop = result.tree.get("grpo")
    if isinstance(loop, dict):
        inner = cast("Tree", loop)
        result.tree["grpo"] = {k: v for k, v in inner.items() if k != "async_grpo" or v is not None}
    asked = tree.get(_FOREIGN)
    if asked is None:
        return result
    if not isinstance(asked, dict):
        result.problems.append(
            Problem("not-allowed", _FOREIGN, f"{asked!r} is not allowed", "allowed: a section")
        )
    elif algorithm != "grpo":
        what = f"asks for an asynchronous run of GRPO, for which alone NeMo RL has it, and this is one of {algorithm}"
        own = f"; {algorithm}.async_{algorithm} asks for one here" if algorithm != "sft" else ""
        result.problems.append(Problem("not-supported", _FOREIGN, what, f"remove it{own}"))
    elif isinstance(loop, dict):
        _merge(cast("Tree", asked), result)
    return result


def _move(source: str, target: str, written: Tree, result: Translation) -> None:
    """Move one key, where there is something to read it; two that contradict each other are told."""
    parent, _, key = source.rpartition(".")
    section = value_at(result.tree, parent)
    if not isinstance(section, dict) or key not in section or not _has_room(result.tree, target):
        return
    value = _section_of(result.tree, source).pop(key)
    if not is_known_of(target, result.tree) and value is not None:
        what = f"{shown(value)} rests on the model, and its config.json is not here"
        remedy = "fetch the model, or describe it in policy.model, and migrate again"
        result.problems.append(Problem("not-supported", source, what, remedy, (target,)))
        return
    if not _is_read(target, result.tree):
        result.dropped.append(source)
        return
    own = value_at(written, target)
    if own is not None and own != value:
        what = f"{shown(value)} contradicts {target}: {shown(own)}"
        result.problems.append(Problem("contradicts", source, what, "remove one of the two", (target,)))
    elif own is None:
        _section_of(result.tree, target)[target.rpartition(".")[2]] = value
        result.origins[target] = source


def _has_room(tree: Tree, target: str) -> bool:
    """Return whether what stands above a key is sections, or nothing; else that is told, and the key has no place."""
    above = accumulate(target.split(".")[:-1], join_path)
    return all(isinstance(value_at(tree, path), dict | None) for path in above)


def _is_read(target: str, tree: Tree) -> bool:
    """Return whether a key of a model's experts has a model with experts, and one of their bias a bias."""
    if not target.startswith(_MODEL):
        return True
    if not value_at(tree, f"{_MODEL}.num_moe_experts"):
        return False
    biased = value_at(tree, f"{_MODEL}.moe_router_enable_expert_bias")
    return bool(biased) or not target.endswith("bias_update_rate")


def _section_of(tree: Tree, path: str) -> Tree:
    """Return the section that a key stands in, as a copy, as are those above it."""
    for key in path.split(".")[:-1]:
        inner = dict(cast("Tree", tree.get(key) or {}))
        tree[key] = inner
        tree = inner
    return tree


def _merge(asked: Tree, result: Translation) -> None:
    """Fill the section of our own; where the two contradict each other, the foreign key is told."""
    loop = dict(cast("Tree", result.tree["grpo"]))
    given = loop.get("async_grpo", {})
    if not isinstance(given, dict):
        return  # which is told of our own key
    own = dict(cast("Tree", given))
    if own.setdefault("enabled", True) is False:
        what = f"asks for an asynchronous run, and {_OWN}.enabled is false"
        result.problems.append(
            Problem("contradicts", _FOREIGN, what, "remove one of the two", (f"{_OWN}.enabled",))
        )
    for path, value in _leaves(asked, _FOREIGN):
        target = _ASYNC.get(path)
        key = (target or "").rpartition(".")[2]
        if path == BUFFER:
            result.dropped.append(path)  # which is judged by the others
            continue
        if path == _SAMPLER:
            if value not in _ORDERS:
                what = f"{shown(value)} discards answers for their age, which nothing here does"
                remedy = f"allowed: {', '.join(_ORDERS)}"
                result.problems.append(Problem("not-supported", path, what, remedy))
                continue
            value = _ORDERS[str(value)]
        if target is None:
            known = ", ".join([*_ASYNC, BUFFER])
            result.problems.append(Problem("unknown-key", path, "unknown key", f"known keys: {known}"))
        elif own.setdefault(key, value) != value:
            what = f"{value} contradicts {target}: {own[key]}"
            result.problems.append(Problem("contradicts", path, what, "remove one of the two", (target,)))
        elif key not in given:
            result.origins[target] = path
    result.problems += _of_the_buffer(asked, own, loop)
    result.tree["grpo"] = {**loop, "async_grpo": own}


def _of_the_buffer(asked: Tree, own: Tree, loop: Tree) -> Iterator[Problem]:
    """Yield a buffer without room for all groups that may be under way; a larger one changes nothing."""
    rollouts, groups = asked.get(BUFFER.rpartition(".")[2]), loop.get("num_prompts_per_step")
    steps = own.get("max_trajectory_age_steps", _DEFAULT_LOOKAHEAD)
    if rollouts is None or not isinstance(steps, int) or not isinstance(groups, int):
        return  # the other two are told by their own keys
    needed = (steps + 1) * groups
    if not isinstance(rollouts, int) or rollouts < needed:
        yield Problem(
            "too-small",
            BUFFER,
            f"{rollouts} has no room for the {needed} groups that may be under way: "
            "(async_rl.sampler.max_lookahead_versions + 1) * grpo.num_prompts_per_step",
            "remove it, or lower async_rl.sampler.max_lookahead_versions",
            ("async_rl.sampler.max_lookahead_versions", "grpo.num_prompts_per_step"),
        )


def _leaves(tree: Tree, prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        path = join_path(prefix, str(key))
        if isinstance(value, dict):
            yield from _leaves(cast("Tree", value), path)
        else:
            yield path, value
