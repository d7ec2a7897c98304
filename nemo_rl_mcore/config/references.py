"""What a recipe takes from the environment (`${oc.env:KEY}`): written and shown as references, never as values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, cast

from pydantic import PrivateAttr, SerializationInfo, SerializerFunctionWrapHandler, model_serializer

from nemo_rl_mcore.config.base import StrictModel, Tree, absolute_path, join_path

PLAIN = "with the values of the environment"
"""Serialization context under which a recipe shows what it took from the environment."""
_SHAPES = ("policy.model.", "teacher.model.", "value.model.")
"""Sizes of the weights, which the tensors next to the recipe show anyway, and which are read without the variable."""
HIDDEN_ANYWHERE = 4
"""Characters of a value from which on it is looked for in all text; a shorter one only where its key is judged."""


@dataclass(frozen=True)
class Reference:
    """A value that rests on the environment: as the recipe refers to it, and what it is now."""

    text: str
    value: object


References = Mapping[str, Reference]
"""References by the paths of their keys."""


def with_references(tree: Tree, references: References) -> Tree:
    """Return the tree of a configuration with references in place of values."""
    if not references:
        return tree
    copies = _by_value(references)

    def written(node: object, path: str) -> object:
        reference = references.get(path) or (copies.get(node) if isinstance(node, str) else None)
        if reference is not None and node is not None and not path.startswith(_SHAPES):
            return reference.text
        if isinstance(node, dict):
            return {key: written(one, join_path(path, key)) for key, one in cast("Tree", node).items()}
        if isinstance(node, list):
            places = enumerate(cast("list[object]", node))
            return [written(one, join_path(path, str(place))) for place, one in places]
        return node

    return cast("Tree", written(tree, ""))


def _by_value(references: References) -> dict[str, Reference]:
    """Keep references by their text, for keys that are filled from others, as a tokenizer from model_name."""
    found: dict[str, Reference] = {}
    for reference in references.values():
        if isinstance(reference.value, str) and len(reference.value) >= HIDDEN_ANYWHERE:
            found |= {reference.value: reference, absolute_path(reference.value): reference}
    return found


class WithReferences(StrictModel):
    """A recipe that remembers what it took from the environment; its JSON has references in place of values."""

    _references: References = PrivateAttr(default_factory=dict[str, Reference])

    def refer(self, references: References) -> Self:
        """Keep what the recipe took from the environment, which is not to be written anywhere."""
        self._references = references
        return self

    @property
    def references(self) -> References:
        """Return what the recipe took from the environment, by the paths of its keys."""
        return self._references

    def plain(self) -> Tree:
        """Return the resolved recipe as JSON has it, with the values of the environment: to compare, not to write."""
        return self.model_dump(mode="json", context=PLAIN)

    @model_serializer(mode="wrap")
    def _refer_in_json(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> Tree:
        """Whoever writes a recipe writes the references."""
        tree = dump(self)
        refers = info.mode == "json" and info.context != PLAIN
        return with_references(tree, self._references) if refers else tree
