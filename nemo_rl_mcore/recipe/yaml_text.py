"""Reading of untrusted YAML: texts that would take excessive memory or time raise a short ValueError."""

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
"""A number with too many digits; Python refuses to parse or print numbers with thousands of digits."""


def read_yaml_text(path: Path, *, follow_links: bool = True, aliases: bool = True) -> str:
    """Return a file's text; raises ValueError as `require_bounded` does, and OSError unless it is a regular file."""
    content = read_regular(path, follow_links=follow_links)
    if len(content) > _BYTES:
        raise ValueError(f"it has {len(content)} bytes, and a recipe at most {_BYTES}")
    text = content.decode()
    require_bounded(text, aliases=aliases)
    return text


class RecipeLoader(yaml.CSafeLoader, get_yaml_loader()):  # pyright: ignore[reportUntypedBaseClass]
    """A loader with OmegaConf's values, such as a number for `1e-5`, and with the parser in C, which is faster.

    Raises yaml.YAMLError for invalid YAML and duplicate keys.
    """


def require_bounded(text: str, *, aliases: bool = True) -> None:
    """Raise ValueError for a YAML text that, with its references expanded, is too large for a recipe.

    aliases: false refuses references. Raises yaml.YAMLError for invalid YAML.
    """
    total, sizes = 0, dict[str | None, int]()
    opened = list[tuple[str | None, int]]()  # each open collection's anchor, and the total before it
    for event in cast("Iterator[yaml.Event]", yaml.parse(text, Loader=yaml.CSafeLoader)):  # pyright: ignore[reportUnknownMemberType]
        anchor = cast("str | None", getattr(event, "anchor", None))
        match event:
            case yaml.AliasEvent():
                if not aliases:
                    raise ValueError("it has references, which may expand to any number of values")
                if anchor not in sizes:
                    raise ValueError(f"&{anchor} contains itself, or is not defined")
                total += sizes[anchor]
            case yaml.CollectionStartEvent():
                sizes.pop(anchor, None)
                opened.append((anchor, total))
                total += 1
                if len(opened) > _DEPTH:
                    raise ValueError(f"it is nested more than {_DEPTH} deep")
            case yaml.CollectionEndEvent():
                name, before = opened.pop()
                sizes[name] = total - before
            case yaml.ScalarEvent():
                _require_short(event)
                sizes[anchor] = 1
                total += 1
            case _:
                pass
        if total > _NODES:
            raise ValueError(f"it has more than {_NODES} values, with those that its references stand for")


def _require_short(event: yaml.ScalarEvent) -> None:
    value, line = cast("str", event.value), event.start_mark.line + 1
    if len(value) > _SCALAR:
        raise ValueError(f"line {line}: a value has {len(value)} characters, and may have {_SCALAR}")
    if event.implicit[0] and _NUMBER.fullmatch(value):
        raise ValueError(f"line {line}: a number has {len(value)} digits")


def require_shallow(text: str) -> None:
    """Raise ValueError for an override that is nested too deeply for a recipe."""
    depths = accumulate((char in "[{") - (char in "]}") for char in text)
    if max(depths, default=0) > _DEPTH:
        raise ValueError(f"it is nested more than {_DEPTH} deep")
