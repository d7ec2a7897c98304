"""What is said of a key of NeMo RL that nothing reads here: its neutral values, and what any other one means."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from nemo_rl_mcore.config.base import Tree, value_at

ANY = object()
"""Neutral value of keys that only a part of NeMo RL reads which is refused elsewhere, or off."""
OFF = object()
"""Neutral value of sections: null, `enabled: false`, or without that key and with nothing set."""
ON = object()
"""Neutral value of sections that state what always holds: anything but `enabled: false`."""


@dataclass(frozen=True)
class SameAs:
    """Neutral value of a key that repeats another one, named by its path, or its neighbour, named by its key."""

    other: str


@dataclass(frozen=True)
class AnyUnless:
    """Any value is neutral while the key at a path is null, false, 0 or left out.

    None is where that key is one of a model that is not known: its config.json is not here.
    """

    path: str


@dataclass(frozen=True)
class Judgement:
    """A known key: its neutral values, and what to do about another one.

    warns: whether another value costs speed or memory and changes nothing else, so that it is told and dropped.
    """

    neutral: tuple[object, ...]
    remedy: str
    warns: bool = False

    def accepts(self, value: object, section: Tree, recipe: Tree) -> bool:
        """Return whether the value changes nothing, given the section it stands in and the whole recipe."""
        return any(_is_neutral(value, neutral, section, recipe) for neutral in self.neutral)


def _is_neutral(value: object, neutral: object, section: Tree, recipe: Tree) -> bool:
    if neutral is ANY:
        return True
    if isinstance(neutral, AnyUnless):
        return is_known_of(neutral.path, recipe) and not value_at(recipe, neutral.path)
    if neutral is OFF or neutral is ON:
        switch = _switch(value)
        return switch is not True if neutral is OFF else switch is not False
    if isinstance(neutral, SameAs):
        known = value_at(recipe, neutral.other) if "." in neutral.other else section.get(neutral.other)
        return known is not None and value == known
    return type(value) is type(neutral) and value == neutral


def is_known_of(path: str, recipe: Tree) -> bool:
    """Return whether a recipe says what a key is: one of a model does with its sizes, which config.json fills in."""
    section = path.rpartition(".")[0]
    return not section.endswith(".model") or value_at(recipe, f"{section}.num_layers") is not None


def _switch(section: object) -> bool | None:
    """Return whether a section is on (true), off (false), or says neither (null)."""
    if not isinstance(section, Mapping):
        return None if section is None else bool(section)
    values = cast("Mapping[str, object]", section)
    if "enabled" in values:
        return bool(values["enabled"])
    return True if any(values.values()) else None


def refused(*neutral: object, remedy: str) -> Judgement:
    """Return a key whose other values ask for something that is missing here."""
    return Judgement(neutral, remedy)


def told(*neutral: object, cost: str) -> Judgement:
    """Return a key whose other values cost speed or memory alone: they are dropped, and a line says so."""
    return Judgement(neutral, cost, warns=True)


UNREAD = refused(ANY, remedy="")
"""A key that changes nothing here, whatever its value."""
OFF_OR_REMOVED = "set it to null, or remove it"


def shown(value: object) -> str:
    """Return a value as a message names it."""
    if isinstance(value, Mapping):
        enabled = cast("Mapping[str, object]", value).get("enabled")
        return "enabled: true" if enabled else "this section"
    if isinstance(value, list):
        return "this list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
