"""Values that a recipe takes from the environment (`${oc.env:KEY}`): saved as references, never as values.

A salted digest is saved with each, so that a run which goes on under another value says so. A digest hides a key of a
service; whoever has the file can still guess a short or common value, which scrypt makes slow and not impossible.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Self, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from nemo_rl_mcore.config.base import StrictModel, Tree, absolute_path, join_path, tuple_from_list
from nemo_rl_mcore.config.interpolations import for_our_resolvers, register

SECTION = "environment_values"
"""The key of a saved recipe that holds the digests."""
PLAIN = "with the values of the environment"
"""Serialization context under which a recipe shows what it took from the environment."""
_SHAPES = ("policy.model.", "teacher.model.", "value.model.")
"""Sizes of the weights, which the tensors next to the recipe show anyway, and which are read without the variable."""
_COST = {"n": 2**14, "r": 8, "p": 1, "dklen": 32}
"""Of scrypt: 16 MiB and about 50 ms for each guess."""
_HIDDEN_ANYWHERE = 4
"""Characters of a value from which on it is looked for in all text; a shorter one only where its key is judged."""
_SHOWN = (57, 60, 297)
"""Characters that a shortened value may be cut to in a message."""


@dataclass(frozen=True)
class Reference:
    """A value that rests on the environment: as the recipe refers to it, and what it is now."""

    text: str
    value: object


References = Mapping[str, Reference]
"""References by the paths of their keys."""


class ValueDigest(StrictModel):
    """The digest of a value that a key took from the environment."""

    key: str
    """The key's path."""
    digest: str
    """scrypt of the value, as hexadecimal digits."""


class EnvironmentValuesConfig(StrictModel):
    """Digests of what a run took from the environment; a run writes them, and nobody else."""

    salt: str
    """Random, of this file alone."""
    digests: Annotated[
        tuple[ValueDigest, ...], BeforeValidator(tuple_from_list), Field(default_factory=tuple)
    ]
    """One for each key."""


# Reading


@dataclass
class _Watch:
    """What was read of the environment for one value; with `stands_in`, marks were given in place of values."""

    stands_in: bool
    reads: list[tuple[str, str, str | None]] = field(default_factory=list[tuple[str, str, "str | None"]])
    """A mark, the reference that it stands for, and the value."""


_watch: ContextVar[_Watch | None] = ContextVar("environment_watch", default=None)
_NONE = object()


def read_environment(key: str, default: object = _NONE) -> str | None:
    """Resolve `${oc.env:KEY,default}` as OmegaConf does, and note that it was asked for."""
    value = oc.env(key) if default is _NONE else oc.env(key, default)
    watch = _watch.get()
    if watch is None:
        return value
    mark = f"\0env{len(watch.reads)}\0"
    watch.reads.append((mark, f"${{oc.env:{key}{_written_default(default)}}}", value))
    return mark if watch.stands_in and value is not None else value


def _written_default(default: object) -> str:
    if default is _NONE:
        return ""
    if not isinstance(default, str):
        return ",null" if default is None else f",{default}"
    escaped = default.replace("\\", "\\\\").replace("'", "\\'")
    return f",'{escaped}'"


def read_value(read: Callable[[], object], raw: Callable[[], object]) -> tuple[object, Reference | None]:
    """Return a value and, where it rests on the environment, the reference to it; raw: the value as it is written."""
    with _watching(stands_in=False) as watch:
        value = read()
    if not watch.reads:
        return value, None
    plain: object = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return value, Reference(_with_marks(read, plain) or str(raw()), plain)


@contextmanager
def _watching(*, stands_in: bool) -> Generator[_Watch]:
    token = _watch.set(_Watch(stands_in))
    try:
        yield cast("_Watch", _watch.get())
    finally:
        _watch.reset(token)


def _with_marks(read: Callable[[], object], value: object) -> str | None:
    """Return the text with references in the places of values; None where something was computed of the values."""
    with _watching(stands_in=True) as watch:
        try:
            text = read()
        except (OmegaConfBaseException, RecursionError):
            return None
    if not isinstance(text, str):
        return None
    filled = referring = text
    for mark, reference, one in reversed(watch.reads):
        filled, referring = filled.replace(mark, str(one)), referring.replace(mark, reference)
    return referring if filled == value else None


# Writing


def with_references(tree: Tree, references: References) -> tuple[Tree, dict[str, Reference]]:
    """Return the tree of a configuration with references in place of values, and where they now stand."""
    found: dict[str, Reference] = {}
    if not references:
        return tree, found
    copies = _by_value(references)

    def written(node: object, path: str) -> object:
        reference = references.get(path) or (copies.get(node) if isinstance(node, str) else None)
        if reference is not None and node is not None and not path.startswith(_SHAPES):
            found[path] = Reference(reference.text, node)
            return reference.text
        if isinstance(node, dict):
            return {key: written(one, join_path(path, key)) for key, one in cast("Tree", node).items()}
        if isinstance(node, list):
            places = enumerate(cast("list[object]", node))
            return [written(one, join_path(path, str(place))) for place, one in places]
        return node

    return cast("Tree", written(tree, "")), found


def _by_value(references: References) -> dict[str, Reference]:
    """Keep references by their text, for keys that are filled from others, as a tokenizer from model_name."""
    found: dict[str, Reference] = {}
    for reference in references.values():
        if isinstance(reference.value, str) and len(reference.value) >= _HIDDEN_ANYWHERE:
            found |= {reference.value: reference, absolute_path(reference.value): reference}
    return found


def digests_of(found: References, salt: str | None = None) -> Tree | None:
    """Return the section of digests; None where nothing is from the environment. salt: left out, a new one."""
    if not found:
        return None
    salt = salt or secrets.token_hex(16)
    known: dict[str, str] = {}
    digests = list[Tree]()
    for path, reference in found.items():
        text = repr(reference.value)
        known[text] = known.get(text) or digest_of(reference.value, salt)
        digests.append({"key": path, "digest": known[text]})
    return {"salt": salt, "digests": digests}


def digest_of(value: object, salt: str) -> str:
    """Return the digest of a value."""
    return hashlib.scrypt(repr(value).encode("utf-8", "surrogatepass"), salt=salt.encode(), **_COST).hex()


def saved_salt(saved: Mapping[str, object]) -> str | None:
    """Return the salt of a saved recipe; None where it has none."""
    section = saved.get(SECTION)
    salt = cast("Tree", section).get("salt") if isinstance(section, dict) else None
    return salt if isinstance(salt, str) else None


def saved_digests(saved: Mapping[str, object]) -> dict[str, Callable[[object], bool]]:
    """Return, by the path of each key from the environment, the test of whether a value is the saved one."""
    try:
        section = EnvironmentValuesConfig.model_validate(saved.get(SECTION))
    except ValidationError:
        return {}

    def is_saved(value: object, digest: str) -> bool:
        return hmac.compare_digest(digest_of(value, section.salt).encode(), digest.encode())

    return {one.key: partial(is_saved, digest=one.digest) for one in section.digests}


def value_now(text: str) -> str | None:
    """Return a saved text with the values that its references have now; None where one has none."""
    if "${" not in text:
        return text
    register("oc.env", read_environment)
    try:
        return str(OmegaConf.create({"value": for_our_resolvers(text)})["value"])
    except OmegaConfBaseException:
        return None


# Showing


def without_values(text: str, references: References, path: str = "") -> str:
    """Return a text for people with references in place of values. path: the key that it is about, if one is."""
    for key, reference in references.items():
        judged = path == key or key.startswith(f"{path}.") if path else False
        for one in _inner(reference.value):
            if len(one) >= (1 if judged else _HIDDEN_ANYWHERE):
                text = _without(text, one, reference.text)
    return text


def _inner(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(cast("Tree", value).values())
    if isinstance(value, list):
        for one in cast("list[object]", value):
            yield from _inner(one)
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def _without(text: str, value: str, reference: str) -> str:
    quoted = repr(value)
    cut = [f"{form[:width]}..." for form in (quoted, value) for width in _SHOWN if len(form) > width]
    for form in (quoted, value, quoted[1:-1], *cut):
        text = text.replace(form, reference)
    return text


class WithReferences(StrictModel):
    """A recipe that remembers what it took from the environment; its JSON has references in place of values."""

    environment_values: EnvironmentValuesConfig | None = None
    """Digests of what a run took by `${oc.env:KEY}`; it writes them into its saved recipe, and no recipe needs them."""
    _references: References = PrivateAttr(default_factory=dict[str, Reference])

    def refer(self, references: References) -> Self:
        """Keep what the recipe took from the environment, which is not to be written anywhere."""
        self._references = references
        return self

    @property
    def references(self) -> References:
        """Return what the recipe took from the environment, by the paths of its keys."""
        return self._references

    def written(self, salt: str | None = None) -> Tree:
        """Return the resolved recipe as JSON has it, with references in place of what is from the environment.

        salt: of the digests; left out, a new one.
        """
        tree, found = with_references(self.plain(), self._references)
        return {**tree, SECTION: digests_of(found, salt)}

    def plain(self) -> Tree:
        """Return the resolved recipe as JSON has it, with the values of the environment: to compare, not to write."""
        return self.model_dump(mode="json", context=PLAIN)

    @model_serializer(mode="wrap")
    def _refer_in_json(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> Tree:
        """Whoever writes a recipe writes the references."""
        tree = dump(self)
        refers = info.mode == "json" and info.context != PLAIN
        return with_references(tree, self._references)[0] if refers else tree
