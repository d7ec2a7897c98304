"""NeMo RL's keys that nothing reads here, by the table judgements.yaml.

A row has the values that change nothing, and what is said of any other one. A migration drops neutral keys; others are
refused or, where they cost speed or memory and nothing else, dropped with a line in the report. So a recipe moves
over, and nothing it asks for is lost silently.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from nemo_rl_mcore.config.base import Tree, join_path, value_at
from nemo_rl_mcore.tools.migrate.draft import Draft, Kind, shown


@dataclass(frozen=True)
class Judgement:
    """What is said of a known key; of one that is neither refused nor told, any value changes nothing.

    neutral: values that change nothing. same_as: nor does that of this key, a neighbour or a whole path. unless: nor
    does any while the key at this path is null, false, 0 or left out. switched_off: nor does a section that is null,
    has `enabled: false`, or leaves that out and sets nothing. refused, told: what to do about another, or its cost.
    """

    neutral: Sequence[object] = ()
    same_as: str = ""
    unless: str = ""
    switched_off: bool = False
    refused: str = ""
    told: str = ""

    @property
    def unread(self) -> bool:
        """Return whether no value changes anything."""
        return not (self.refused or self.told)

    def accepts(self, value: object, section: Tree, recipe: Tree) -> bool:
        """Return whether the value changes nothing, given the section it stands in and the whole recipe."""
        other = value_at(recipe, self.same_as) if "." in self.same_as else section.get(self.same_as)
        return (
            self.unread
            or (self.switched_off and not _is_on(value))
            or (other is not None and value == other)
            or (self.unless != "" and is_known_of(self.unless, recipe) and not value_at(recipe, self.unless))
            or any(type(value) is type(neutral) and value == neutral for neutral in self.neutral)
        )


def is_known_of(path: str, recipe: Tree) -> bool:
    """Return whether a recipe says what a key is: one of a model does with its sizes, which config.json fills in."""
    section = path.rpartition(".")[0]
    return not section.endswith(".model") or value_at(recipe, f"{section}.num_layers") is not None


def _is_on(section: object) -> bool:
    if not isinstance(section, Mapping):
        return bool(section)
    values = cast("Mapping[str, object]", section)
    return bool(values["enabled"]) if "enabled" in values else any(values.values())


def _read() -> dict[str, Judgement]:
    """Return the rows of the table by their paths; a section of it is for one section of a recipe, or for several."""
    text = Path(__file__).with_name("judgements.yaml").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = yaml.safe_load(text)
    nothing = dict[str, Any]()
    return {
        join_path("" if section == "top" else section, key): Judgement(
            **(nothing if row == "unread" else row)
        )
        for sections, rows in table.items()
        for section in sections.split()
        for key, row in rows.items()
    }


JUDGEMENTS = _read()


def judge(draft: Draft, path: str, value: object, section: Tree, recipe: Tree, judged_as: str = "") -> bool:
    """Sort a key out by the table, in which it may stand as another one; False for one that is not in it."""
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
    """Take the keys of the table out; recipe: the same one, with what config.json says of its models."""
    _screen(draft, draft.tree, recipe, "", "")


def _screen(draft: Draft, section: Tree, recipe: Tree, prefix: str, written: str) -> None:
    """`prefix` leads to the section in the table, and `written` in the recipe: with the places of lists."""
    for key, value in [*section.items()]:
        path, place = join_path(prefix, str(key)), join_path(written, str(key))
        if judge(draft, place, value, section, recipe, path):
            section.pop(key, None)
        elif isinstance(value, dict):
            _screen(draft, cast("Tree", value), recipe, path, place)
        elif isinstance(value, list):
            for number, one in enumerate(cast("list[object]", value)):
                if isinstance(one, dict):
                    _screen(draft, cast("Tree", one), recipe, path, join_path(place, str(number)))
