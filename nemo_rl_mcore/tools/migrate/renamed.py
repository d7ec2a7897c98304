"""NeMo RL's keys that stand under another name here, or in another section.

async_rl, which it has for GRPO alone, is async_grpo here; its critic and teacher are a whole policy again, cut as the
policy is, where ours name what may differ. What async_rl asks for besides is judged by the table, or unknown.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import cast

from nemo_rl_mcore.config.base import Tree, join_path, value_at
from nemo_rl_mcore.recipe.of_nemo_rl import leaf_paths
from nemo_rl_mcore.tools.migrate.draft import Draft, Kind, shown
from nemo_rl_mcore.tools.migrate.judgements import JUDGEMENTS, is_known_of, judge

_FOREIGN = "async_rl"
_OWN = "grpo.async_grpo"
BUFFER = "async_rl.max_buffered_rollouts"
"""Compared with what may be under way, and read no further."""
_MODEL = "policy.model"

_SAMPLER = "async_rl.sampler.name"
_ORDERS = {"in_order": "in_order", "weight_fifo": "in_order", "ready_first": "as_completed"}
"""The order of consumption that each sampler is. `windowed` answers more than it trains on, and discards by age."""
_ASYNC: dict[str, str] = {
    _SAMPLER: f"{_OWN}.order",
    "async_rl.sampler.max_lookahead_versions": f"{_OWN}.max_trajectory_age_steps",
    "async_rl.sampler.max_staleness_versions": f"{_OWN}.max_trajectory_age_steps",
    "async_rl.in_flight_weight_updates": f"{_OWN}.in_flight_weight_updates",
    "async_rl.recompute_kv_cache_after_weight_updates": f"{_OWN}.recompute_kv_cache_after_weight_updates",
    "async_rl.min_groups_for_streaming_train": f"{_OWN}.min_groups_for_streaming_train",
    "async_rl.max_inflight_prompts": f"{_OWN}.max_inflight_prompts",
    "async_rl.rollout_timeout_s": f"{_OWN}.rollout_timeout_s",
}
_MOVED: dict[str, str] = {
    # Read where the model has experts; the third, where they are balanced by a bias.
    "policy.megatron_cfg.moe_router_dtype": "policy.model.moe_router_dtype",
    "policy.megatron_cfg.moe_router_load_balancing_type": "policy.model.moe_router_load_balancing_type",
    "policy.megatron_cfg.moe_router_bias_update_rate": "policy.model.moe_router_bias_update_rate",
    "policy.megatron_cfg.moe_aux_loss_coeff": "policy.model.moe_aux_loss_coeff",
    "ppo.policy_training_start_step": "ppo.critic_warmup_steps",
    "env.math.num_workers": "env.pool.size",
}
_OF_CRITIC = ("optimizer", "scheduler")
"""Sections of value.megatron_cfg that stand in value here."""
RENAMED: dict[str, str] = (
    _ASYNC | _MOVED | {f"value.megatron_cfg.{key}": f"value.{key}" for key in _OF_CRITIC}
)
"""The key that is read for each of NeMo RL's."""

_DEFAULT_LOOKAHEAD = 1
"""Of max_lookahead_versions there, and of max_trajectory_age_steps here."""


def rename(draft: Draft, recipe: Tree) -> None:
    """Move keys to the names they have here; recipe: the same one, with what config.json says of its models."""
    for source, target in _MOVED.items():
        above = accumulate(target.split(".")[:-1], join_path)
        # Where a section above the key is none, that is told, and the key has no place.
        if draft.has(source) and all(isinstance(draft.get(path), dict | None) for path in above):
            _move(draft, recipe, source, target)
    if draft.get(_OWN) is None:
        draft.pop(_OWN)
    asked, given = draft.section(_FOREIGN), draft.pop(_FOREIGN)
    if given is None:
        return
    if not isinstance(given, dict):
        draft.refuse(_FOREIGN, given, "allowed: a section", f"{given!r} is not allowed")
    elif draft.algorithm != "grpo":
        what = "asks for an asynchronous run of GRPO, for which alone NeMo RL has it, and this is one of "
        own = f"; {draft.algorithm}.async_{draft.algorithm} asks for one here"
        remedy = f"remove it{own if draft.algorithm != 'sft' else ''}"
        draft.refuse(_FOREIGN, asked, remedy, what + draft.algorithm)
    elif isinstance(draft.get(_OWN), dict | None):  # else that is told
        _merge(draft, asked)


def _move(draft: Draft, recipe: Tree, source: str, target: str) -> None:
    """Move one key, where there is something to read it; two that contradict each other are told."""
    value, own = draft.get(source), draft.get(target)
    if not is_known_of(target, recipe) and value is not None:
        what = f"{shown(value)} rests on the model, and its config.json is not here"
        draft.refuse(
            source, value, "fetch the model, or describe it in policy.model, and migrate again", what
        )
    elif target.startswith(_MODEL) and not _is_read(target, recipe):
        draft.drop(source)
    elif own is None:
        draft.rename(source, target)
    elif own == value:
        draft.pop(source)
    else:
        draft.refuse(
            source, value, "remove one of the two", f"{shown(value)} contradicts {target}: {shown(own)}"
        )


def _is_read(target: str, recipe: Tree) -> bool:
    """Return whether a key of experts has a model with experts, and one of their bias a bias."""
    biased = value_at(recipe, f"{_MODEL}.moe_router_enable_expert_bias")
    has_experts = bool(value_at(recipe, f"{_MODEL}.num_moe_experts"))
    return has_experts and (bool(biased) or not target.endswith("bias_update_rate"))


def _merge(draft: Draft, asked: Tree) -> None:
    """Fill the section of our own; where the two contradict each other, the foreign key is told."""
    given = draft.section(_OWN)
    own = dict(given)
    if own.setdefault("enabled", True) is False:
        what = f"asks for an asynchronous run, and {_OWN}.enabled is false"
        draft.refuse(_FOREIGN, asked, "remove one of the two", what)
    for path in leaf_paths({_FOREIGN: asked}):
        value, target = value_at({_FOREIGN: asked}, path), _ASYNC.get(path)
        key = (target or "").rpartition(".")[2]
        if path == BUFFER:
            draft.dropped.append(path)  # which is judged by the others
        elif value == {}:
            continue
        elif path == _SAMPLER and value not in _ORDERS:
            what = f"{shown(value)} discards answers for their age, which nothing here does"
            draft.refuse(path, value, f"allowed: {', '.join(_ORDERS)}", what)
        elif target is None:
            draft.refuse(path, value, f"known keys: {', '.join([*_ASYNC, BUFFER])}", "unknown key")
        else:
            value = _ORDERS[str(value)] if path == _SAMPLER else value
            if own.setdefault(key, value) != value:
                what = f"{value} contradicts {target}: {own[key]}"
                draft.refuse(path, value, "remove one of the two", what)
            elif key not in given:
                draft.origins[target] = path
                draft.note(Kind.RENAMED, path, target)
    _judge_buffer(draft, asked, own)
    draft.set(_OWN, own)


def _judge_buffer(draft: Draft, asked: Tree, own: Tree) -> None:
    """Refuse a buffer without room for all groups that may be under way; a larger one changes nothing."""
    rollouts, groups = asked.get(BUFFER.rpartition(".")[2]), draft.get("grpo.num_prompts_per_step")
    steps = own.get("max_trajectory_age_steps", _DEFAULT_LOOKAHEAD)
    if rollouts is None or not isinstance(steps, int) or not isinstance(groups, int):
        return  # the other two are told by their own keys
    needed = (steps + 1) * groups
    if not isinstance(rollouts, int) or rollouts < needed:
        what = f"{rollouts} has no room for the {needed} groups that may be under way: "
        formula = "(async_rl.sampler.max_lookahead_versions + 1) * grpo.num_prompts_per_step"
        remedy = "remove it, or lower async_rl.sampler.max_lookahead_versions"
        draft.refuse(BUFFER, rollouts, remedy, what + formula)


# A critic and a teacher

_OWN_KEYS: dict[str, tuple[str, ...]] = {
    "value": ("optimizer", "scheduler", "max_grad_norm", "train_micro_batch_size"),
    "teacher": ("model", "model_name", "hf_config_overrides", "init_checkpoint"),
}
"""What the sections hold here."""
_CUT = (
    *("micro_batch_size", "logprob_batch_size", "dynamic_batching", "sequence_packing", "parallel"),
    *("pipeline_stage", "activation_checkpointing", "recompute_", "distributed_data_parallel_config"),
    *("fused_linear", "_fusion"),
)
"""Parts of the names of keys that say how a model is cut, and nothing of what it computes."""


def screen_second_models(draft: Draft, recipe: Tree) -> None:
    """Leave of value and teacher what they hold here; recipe: as it was before the table was applied."""
    for name, own in _OWN_KEYS.items():
        section = draft.section(name)
        if not any(value_at(recipe, f"policy.{key}") is not None for key in section if key not in own):
            continue
        kept = {key: section[key] for key in own if _is_ours(key, section.get(key))}
        rest = {key: value for key, value in section.items() if key not in kept}
        draft.set(name, kept)
        for key in _OF_CRITIC if name == "value" else ():
            theirs = value_at(rest, f"megatron_cfg.{key}")
            if isinstance(theirs, dict):
                cast("Tree", rest["megatron_cfg"]).pop(key)
                if key not in kept:
                    _move_section(draft, recipe, key, cast("Tree", theirs))
        for path, value, around in _leaves(rest, ""):
            _compare(draft, recipe, name, path, value, around)


def _is_ours(key: str, value: object) -> bool:
    """Return whether a key of ours holds what it holds here: PyTorch's optimizers and schedules have the same names."""
    if key in _OF_CRITIC:
        return isinstance(value, dict) and "name" not in value
    return value is not None


def _move_section(draft: Draft, recipe: Tree, key: str, section: Tree) -> None:
    source, kept = f"value.megatron_cfg.{key}", Tree()
    for leaf, value in section.items():
        if not judge(draft, f"{source}.{leaf}", value, section, recipe, f"policy.megatron_cfg.{key}.{leaf}"):
            kept[leaf] = value
            draft.origins[f"value.{key}.{leaf}"] = f"{source}.{leaf}"
    draft.set(f"value.{key}", kept)
    if kept:
        draft.note(Kind.RENAMED, source, f"value.{key}")


def _leaves(section: Tree, prefix: str) -> Iterator[tuple[str, object, Tree]]:
    for key, value in section.items():
        path = join_path(prefix, str(key))
        if isinstance(value, dict) and f"policy.{path}" not in JUDGEMENTS:
            yield from _leaves(cast("Tree", value), path)
        else:
            yield path, value, section


def _compare(draft: Draft, recipe: Tree, name: str, path: str, value: object, section: Tree) -> None:
    """Say what a key of a second model asks for that the policy's does not."""
    written, of_policy = f"{name}.{path}", value_at(recipe, f"policy.{path}")
    if value is None or value == of_policy:
        draft.dropped.append(written)
    elif judge(draft, written, value, section, recipe, f"policy.{path}"):
        return
    elif any(part in path for part in _CUT):
        cost = f"it is cut as the policy is, by policy.{path}: {shown(of_policy)}"
        draft.note(Kind.WARNED, written, f"{shown(value)} has no effect here; {cost}")
    else:
        what = f"{shown(value)} differs from policy.{path}: {shown(of_policy)}"
        draft.refuse(written, value, "remove it, or give both the same value", what)
