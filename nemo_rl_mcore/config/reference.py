"""The reference page of all keys, made from the models and from the table of unsupported keys.

Run as a module, it writes the page to standard output.
"""

import inspect
import sys
from collections.abc import Iterator
from itertools import chain

from pydantic.fields import FieldInfo

from nemo_rl_mcore.config.base import StrictModel, join_path
from nemo_rl_mcore.config.foreign.judgement import ANY, OFF, ON, AnyUnless, Judgement, SameAs
from nemo_rl_mcore.config.foreign.translated import TRANSLATED
from nemo_rl_mcore.config.foreign.unsupported import UNSUPPORTED
from nemo_rl_mcore.config.master import RUN_CONFIGS, GRPOMasterConfig, RunConfig
from nemo_rl_mcore.config.schema import allowed, section_of
from nemo_rl_mcore.config.source import SourceConfig

_INTRODUCTION = """\
# Reference of the keys

Every key of a recipe, with what it allows, its default and its meaning.
[Configuration](configuration.md) says how recipes are put together.
This page is generated; a test keeps it equal to the models:

```bash
uv run python -m nemo_rl_mcore.config.reference > docs/config_reference.md
```
"""

_UNSUPPORTED_INTRODUCTION = """\
## NeMo RL keys that do nothing here

A recipe may keep such a key at a neutral value, where it changes nothing. What another value does stands in the
last columns: it is refused with an advice, or, where it costs speed or memory alone, warned of. The table stands in
`nemo_rl_mcore/config/foreign/`.
"""


_TRANSLATED_INTRODUCTION = """\
## NeMo RL keys that have another name here

A recipe may keep these; they fill the key beside them, and `async_rl` makes the run asynchronous.
"""


def reference_page() -> str:
    """Return the page as Markdown, ending with a line feed."""
    others = (kind for kind in RUN_CONFIGS.values() if kind is not GRPOMasterConfig)
    sections = (
        *_sections(GRPOMasterConfig, ""),
        *chain.from_iterable(_sections_of_its_own(kind) for kind in others),
        _translated_section(),
        _unsupported_section(),
    )
    return "\n".join((_INTRODUCTION, *sections))


def _sections_of_its_own(kind: type[RunConfig]) -> Iterator[str]:
    """Yield what recipes of an algorithm have besides the sections that all have."""
    yield f"## Recipes of `{kind.algorithm}`\n\n{inspect.getdoc(kind)} Sections of all recipes stand above.\n"
    own = kind.model_fields.keys() - RunConfig.model_fields.keys()
    for name in (name for name in kind.model_fields if name in own):
        section = section_of(kind.model_fields[name])
        assert section is not None
        yield from _sections(section, name)


def _sections(model: type[StrictModel], path: str) -> Iterator[str]:
    """Yield a section's own keys, then the sections inside it; one that may be null is a key as well.

    The keys of sources stand once, below data.train.
    """
    inner = {name: section for name, field in model.model_fields.items() if (section := section_of(field))}
    own = {name: field for name, field in model.model_fields.items() if inner.get(name) != field.annotation}
    title = f"## `{path}`" if path else "## Top level"
    rows = (_row(name, field) for name, field in own.items())
    table = _table(("key", "allowed", "default", "meaning"), rows)
    yield f"{title}\n\n{inspect.getdoc(model)}\n\n{table}"
    for name, section in inner.items():
        inside = join_path(path, name)
        if section is not SourceConfig or inside == "data.train":
            yield from _sections(section, inside)


def _row(name: str, field: FieldInfo) -> tuple[str, ...]:
    default = "required" if field.is_required() else f"`{_yaml(field.default)}`"
    return f"`{name}`", allowed(field), default, " ".join((field.description or "").split())


def _translated_section() -> str:
    rows = ((f"`{foreign}`", f"`{own}`") for foreign, own in TRANSLATED.items())
    return _TRANSLATED_INTRODUCTION + "\n" + _table(("key", "read as"), rows)


def _unsupported_section() -> str:
    rows = (_unsupported_row(path, known) for path, known in UNSUPPORTED.items())
    return _UNSUPPORTED_INTRODUCTION + "\n" + _table(("key", "neutral", "otherwise", "what is said"), rows)


def _unsupported_row(path: str, known: Judgement) -> tuple[str, ...]:
    otherwise = "" if known.neutral == (ANY,) else "warned of" if known.warns else "refused"
    return f"`{path}`", " or ".join(_neutral(value) for value in known.neutral), otherwise, known.remedy


def _neutral(value: object) -> str:
    if isinstance(value, SameAs):
        return f"the value of `{value.other}`"
    if isinstance(value, AnyUnless):
        return f"any value where `{value.path}` is off"
    if value is ANY:
        return "any value; it is not read"
    if value is OFF or value is ON:
        return "off (`enabled: false`)" if value is OFF else "on, or left out"
    return f"`{_yaml(value)}`"


def _yaml(value: object) -> str:
    """Write a value as a recipe does."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _table(headings: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [_line(row) for row in rows] or [_line(("none", *("",) * (len(headings) - 1)))]
    return "\n".join((_line(headings), _line(("---",) * len(headings)), *lines)) + "\n"


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(reference_page())
