"""NeMo RL's keys that nothing reads here, by the table judgements.yaml; renamed keys; critic and teacher.

A row of the table lists the values that change nothing: those keys are dropped. Other values are refused or, if only
speed or memory depend on them, dropped with a line in the report. Nothing is lost silently.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import yaml

from nemo_rl_mcore.config.base import Tree, join_path, value_at
from nemo_rl_mcore.recipe.of_nemo_rl import inner_sections, leaf_paths
from nemo_rl_mcore.tools.migrate.draft import KEYS, Draft, Kind, shown


@dataclass(frozen=True)
class Judgement:
    """A known key's row; without `refused` and `told`, all values are accepted, as they change nothing.

    neutral: accepted values. same_as: the value of this neighbour or path is accepted, too. unless: all values are
    accepted while the key at this path is null, false, 0 or missing. switched_off: a section is accepted if it is null,
    has `enabled: false`, or lacks that and sets nothing. refused, told: advice on other values, or their cost.
    """

    neutral: Sequence[object] = ()
    same_as: str = ""
    unless: str = ""
    switched_off: bool = False
    refused: str = ""
    told: str = ""

    @property
    def unread(self) -> bool:
        return not (self.refused or self.told)

    def accepts(self, value: object, section: Tree, recipe: Tree) -> bool:
        """Return True if the value changes nothing in this section of this recipe."""
        is_neutral = any(type(value) is type(neutral) and value == neutral for neutral in self.neutral)
        if is_neutral or self.unread:
            return True
        enabled = value
        if isinstance(value, Mapping):
            values = cast("Mapping[str, object]", value)
            enabled = values.get("enabled", any(values.values()))
        if self.switched_off and not enabled:
            return True
        other = value_at(recipe, self.same_as) if "." in self.same_as else section.get(self.same_as)
        if other is not None and value == other:
            return True
        return bool(self.unless) and is_known_of(self.unless, recipe) and not value_at(recipe, self.unless)


def is_known_of(path: str, recipe: Tree) -> bool:
    """Return True if a key's value is known; a model's keys are unknown until config.json has given its sizes."""
    section = path.rpartition(".")[0]
    return not section.endswith(".model") or value_at(recipe, f"{section}.num_layers") is not None


_TABLE: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("judgements.yaml").read_text(encoding="utf-8")
)
_NOTHING = dict[str, Any]()
JUDGEMENTS = {
    join_path("" if section == "top" else section, key): Judgement(**(_NOTHING if row == "unread" else row))
    for sections, rows in _TABLE.items()
    for section in sections.split()
    for key, row in rows.items()
}
"""The rows by key; a section of the table may stand for several sections of a recipe."""


def judge(draft: Draft, path: str, value: object, section: Tree, recipe: Tree, judged_as: str = "") -> bool:
    """Judge a key by its row, or by `judged_as`'s row; return False if there is none."""
    known = JUDGEMENTS.get(judged_as or path)
    if known is None:
        return False
    if known.accepts(value, section, recipe):
        draft.dropped.append(path)
    elif known.told:
        draft.note(Kind.WARNED, path, f"{shown(value)} has no effect here; {known.told}")
    else:
        draft.refuse(path, value, known.refused, f"{shown(value)} is not supported")
    return True


def screen(draft: Draft, recipe: Tree) -> None:
    """Remove the table's keys; recipe: the draft, completed from its models' config.json."""

    def screen_section(section: Tree, prefix: str, written: str) -> None:
        """Screen a section; prefix: its path in the table, written: its path in the recipe, with list indices."""
        for key, value in [*section.items()]:
            path, place = join_path(prefix, str(key)), join_path(written, str(key))
            if judge(draft, place, value, section, recipe, path):
                section.pop(key, None)
                continue
            for number, inner in inner_sections(value):
                screen_section(inner, path, join_path(place, number))

    screen_section(draft.tree, "", "")


_FOREIGN = "async_rl"
_OWN = "grpo.async_grpo"
BUFFER = "async_rl.max_buffered_rollouts"
"""Only compared with the number of groups in flight."""
_MODEL = "policy.model"

_SAMPLER = "async_rl.sampler.name"
_ASYNC: dict[str, str] = KEYS["asynchronous"]
RENAMED: dict[str, str] = _ASYNC | KEYS["moved"] | KEYS["restated"] | KEYS["critic"]
"""Our key for each of NeMo RL's."""


def rename(draft: Draft, recipe: Tree) -> None:
    """Rename keys to this package's names; recipe: the draft, completed from its models' config.json.

    Expert keys are dropped for models without experts, and the bias's rate for models without a bias. Contradicting
    keys are refused.
    """
    has_experts = bool(value_at(recipe, f"{_MODEL}.num_moe_experts"))
    biased = has_experts and bool(value_at(recipe, f"{_MODEL}.moe_router_enable_expert_bias"))
    for source, target in KEYS["moved"].items():
        above = accumulate(target.split(".")[:-1], join_path)
        if not draft.has(source) or not all(isinstance(draft.get(path), dict | None) for path in above):
            continue  # not a section, which `check` reports
        value, own = draft.get(source), draft.get(target)
        if value is None and not target.startswith(_MODEL):
            draft.drop(source)
            continue
        is_read = biased if target.endswith("bias_update_rate") else has_experts
        if not is_known_of(target, recipe) and value is not None:
            what = f"{shown(value)} depends on the model, whose config.json is not on this machine"
            remedy = "download the model, or describe it in policy.model, then migrate again"
            draft.refuse(source, value, remedy, what)
        elif target.startswith(_MODEL) and not is_read:
            draft.drop(source)
        elif own is None:
            draft.rename(source, target)
        elif own == value:
            draft.drop(source)
        else:
            what = f"{shown(value)} contradicts {target}: {shown(own)}"
            draft.refuse(source, value, "remove one of the two", what)
    _rename_asynchronous(draft)


def _rename_asynchronous(draft: Draft) -> None:
    """Move async_rl's keys; refuse a buffer without room for all groups in flight."""
    if draft.get(_OWN) is None:
        draft.pop(_OWN)
    asked, given = draft.section(_FOREIGN), draft.pop(_FOREIGN)
    if given is None:
        return
    if not isinstance(given, dict):
        draft.refuse(_FOREIGN, given, "allowed: a section", f"{given!r} is not allowed")
    elif draft.algorithm != "grpo":
        what = f"makes GRPO asynchronous, and NeMo RL has it for GRPO alone; this is {draft.algorithm}"
        own = f"; use {draft.algorithm}.async_{draft.algorithm} here"
        draft.refuse(_FOREIGN, asked, f"remove it{own if draft.algorithm != 'sft' else ''}", what)
    elif isinstance(draft.get(_OWN), dict | None):  # else `check` reports it
        own = _merge(draft, asked)
        rollouts, groups = asked.get(BUFFER.rpartition(".")[2]), draft.get("grpo.num_prompts_per_step")
        steps = own.get("max_trajectory_age_steps", 1)  # the default in both packages
        if rollouts is not None and isinstance(steps, int) and isinstance(groups, int):
            needed = (steps + 1) * groups
            if not isinstance(rollouts, int) or rollouts < needed:
                what = f"{rollouts} leaves no room for {needed} groups in flight: "
                formula = "(async_rl.sampler.max_lookahead_versions + 1) * grpo.num_prompts_per_step"
                remedy = "remove it, or lower async_rl.sampler.max_lookahead_versions"
                draft.refuse(BUFFER, rollouts, remedy, what + formula)
        draft.set(_OWN, own)


def _merge(draft: Draft, asked: Tree) -> Tree:
    """Return our own section with NeMo RL's keys merged in; contradicting ones are refused."""
    given = draft.section(_OWN)
    own = dict(given)
    if own.setdefault("enabled", True) is False:
        what = f"makes the run asynchronous, but {_OWN}.enabled is false"
        draft.refuse(_FOREIGN, asked, "remove one of the two", what)
    for path in leaf_paths({_FOREIGN: asked}):
        value, target = value_at({_FOREIGN: asked}, path), _ASYNC.get(path)
        key = (target or "").rpartition(".")[2]
        if path == BUFFER:
            draft.dropped.append(path)  # `_rename_asynchronous` compares it
        elif value == {}:
            continue
        elif path == _SAMPLER and value not in KEYS["orders"]:
            what = f"{shown(value)} discards answers by age, which nothing here does"
            draft.refuse(path, value, f"allowed: {', '.join(KEYS['orders'])}", what)
        elif target is None:
            draft.refuse(path, value, f"known keys: {', '.join([*_ASYNC, BUFFER])}", "unknown key")
        else:
            value = KEYS["orders"][str(value)] if path == _SAMPLER else value
            if own.setdefault(key, value) != value:
                what = f"{value} contradicts {target}: {own[key]}"
                draft.refuse(path, value, "remove one of the two", what)
            elif key not in given:
                draft.origins[target] = path
                draft.note(Kind.RENAMED, path, target)
    return own


# A critic and a teacher

_OF_CRITIC = ("optimizer", "scheduler")
"""Sections of value.megatron_cfg that belong in value here."""


def screen_second_models(draft: Draft, recipe: Tree) -> None:
    """Keep the keys that value and teacher have here, and judge all others that differ from the policy's.

    recipe: the draft before the table was applied.
    """
    for name, own in KEYS["own_keys"].items():
        section = draft.section(name)
        if not any(value_at(recipe, f"policy.{key}") is not None for key in section if key not in own):
            continue
        kept = Tree()
        for key in own:
            value = section.get(key)
            # Sections for PyTorch's optimizers and schedules share our names, but have a `name` inside.
            if (isinstance(value, dict) and "name" not in value) if key in _OF_CRITIC else value is not None:
                kept[key] = value
        rest = {key: value for key, value in section.items() if key not in kept}
        draft.set(name, kept)
        if name == "value":
            _move_sections(draft, recipe, rest, kept)
        for path, value, around in _leaves(rest, ""):
            written, of_policy = f"{name}.{path}", value_at(recipe, f"policy.{path}")
            if value is None or value == of_policy:
                draft.dropped.append(written)
            elif judge(draft, written, value, around, recipe, f"policy.{path}"):
                continue
            elif any(part in path for part in KEYS["cut"]):
                cost = f"the policy's layout applies, policy.{path}: {shown(of_policy)}"
                draft.note(Kind.WARNED, written, f"{shown(value)} has no effect here; {cost}")
            else:
                what = f"{shown(value)} differs from policy.{path}: {shown(of_policy)}"
                draft.refuse(written, value, "remove it, or give both the same value", what)


def _move_sections(draft: Draft, recipe: Tree, rest: Tree, kept: Tree) -> None:
    """Move the critic's optimizer and scheduler out of `rest`, into sections that `kept` lacks."""
    for key in _OF_CRITIC:
        source, theirs = f"value.megatron_cfg.{key}", value_at(rest, f"megatron_cfg.{key}")
        if not isinstance(theirs, dict):
            continue
        cast("Tree", rest["megatron_cfg"]).pop(key)
        if key in kept:
            continue
        inner, ours = cast("Tree", theirs), Tree()
        for leaf, value in inner.items():
            row = f"policy.megatron_cfg.{key}.{leaf}"
            if not judge(draft, f"{source}.{leaf}", value, inner, recipe, row):
                ours[leaf] = value
                draft.origins[f"value.{key}.{leaf}"] = f"{source}.{leaf}"
        draft.set(f"value.{key}", ours)
        if ours:
            draft.note(Kind.RENAMED, source, f"value.{key}")


def _leaves(section: Tree, prefix: str) -> Iterator[tuple[str, object, Tree]]:
    for key, value in section.items():
        path = join_path(prefix, str(key))
        if isinstance(value, dict) and f"policy.{path}" not in JUDGEMENTS:
            yield from _leaves(cast("Tree", value), path)
        else:
            yield path, value, section
