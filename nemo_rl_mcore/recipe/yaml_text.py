"""YAML that others wrote: what takes memory or time without end is a ValueError with a short message here."""

import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import cast

import yaml
from omegaconf._utils import get_yaml_loader  # pyright: ignore[reportPrivateUsage]

from nemo_rl_mcore.data.strict_json import read_regular

_BYTES = 2**20
_DEPTH = 50
_NODES = 100_000
_SCALAR = 2**16
_NUMBER = re.compile(r"[-+0-9a-fA-FxXoO_:.]{100,}")
"""A number of more digits than any has; Python refuses to read or to print one of thousands."""


def read_yaml_text(path: Path, *, follow_links: bool = True, aliases: bool = True) -> str:
    """Return the text of a file; raises ValueError as `require_bounded` does, OSError where it is no regular file."""
    content = read_regular(path, follow_links=follow_links)
    if len(content) > _BYTES:
        raise ValueError(f"it has {len(content)} bytes, and a recipe at most {_BYTES}")
    text = content.decode()
    require_bounded(text, aliases=aliases)
    return text


class _Loader(yaml.CSafeLoader, get_yaml_loader()):  # pyright: ignore[reportUntypedBaseClass]
    """Constructs what OmegaConf's loader does, over the parser in C."""


def values_of(text: str) -> object:
    """Return what OmegaConf reads in a YAML text, such as a number in `1e-5`, in less time.

    Raises yaml.YAMLError for what is not YAML, or has a key twice.
    """
    return yaml.load(text, Loader=_Loader)


def require_bounded(text: str, *, aliases: bool = True) -> None:
    """Raise ValueError for a YAML text that is larger than a recipe can be, with what its references stand for.

    aliases: whether references are allowed at all. Raises yaml.YAMLError for what is not YAML.
    """
    counted = _Counted()
    for event in cast("Iterator[yaml.Event]", yaml.parse(text, Loader=yaml.CSafeLoader)):  # pyright: ignore[reportUnknownMemberType]
        if isinstance(event, yaml.AliasEvent) and not aliases:
            raise ValueError("it has references, which may stand for any number of values")
        counted.take(event)
        if counted.total > _NODES:
            raise ValueError(f"it has more than {_NODES} values, with those that its references stand for")


def require_shallow(text: str) -> None:
    """Raise ValueError for an override that is nested deeper than a recipe can be."""
    depths = accumulate((char in "[{") - (char in "]}") for char in text)
    if max(depths, default=0) > _DEPTH:
        raise ValueError(f"it is nested more than {_DEPTH} deep")


class _Counted:
    """How many values were read so far, with what references stand for."""

    def __init__(self) -> None:
        self.total = 0
        self._open = list[
            tuple[str | None, int]
        ]()  # of each open collection its anchor, and the total before it
        self._sizes = dict[str | None, int]()

    def take(self, event: yaml.Event) -> None:
        """Count an event; raises ValueError for one that goes too deep, is too long, or refers to what holds it."""
        anchor = cast("str | None", getattr(event, "anchor", None))
        match event:
            case yaml.AliasEvent():
                if anchor not in self._sizes:
                    raise ValueError(f"&{anchor} holds itself, or is not there")
                self.total += self._sizes[anchor]
            case yaml.CollectionStartEvent():
                self._sizes.pop(anchor, None)
                self._open.append((anchor, self.total))
                self.total += 1
                if len(self._open) > _DEPTH:
                    raise ValueError(f"it is nested more than {_DEPTH} deep")
            case yaml.CollectionEndEvent():
                name, before = self._open.pop()
                self._sizes[name] = self.total - before
            case yaml.ScalarEvent():
                value, line = cast("str", event.value), event.start_mark.line + 1
                if len(value) > _SCALAR:
                    raise ValueError(
                        f"line {line}: a value has {len(value)} characters, and may have {_SCALAR}"
                    )
                if event.implicit[0] and _NUMBER.fullmatch(value):
                    raise ValueError(f"line {line}: a number has {len(value)} digits")
                self._sizes[anchor] = 1
                self.total += 1
            case _:
                pass
