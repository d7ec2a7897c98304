"""Sources of a recipe: YAML files joined by `defaults:`, then command-line overrides."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from glob import glob
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rl_mcore.config.base import Code, ConfigError, Problem, join_path, refused
from nemo_rl_mcore.config.master import kind_of
from nemo_rl_mcore.recipe.schema import Kind, is_known, suggestion
from nemo_rl_mcore.recipe.shipped import shipped_recipe
from nemo_rl_mcore.recipe.yaml_text import RecipeLoader, read_yaml_text, require_shallow

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

FILES = ("data_path", "prompt_file", "system_prompt_file", "tokenizer.name", "endpoint.command")
"""Keys at any depth whose files are looked up next to the recipe, then in the working directory."""


def recipe_file(folder: Path, name: str | Path) -> Path:
    """Return the recipe with this name: a file relative to the folder, or else a shipped recipe."""
    path = folder / name
    return path if path.exists() else shipped_recipe(name) or path


def anchored[Node](node: Node, folder: Path, path: str = "") -> Node:
    """Return a recipe's tree with paths relative to the recipe's folder made absolute."""
    if isinstance(node, dict):
        section = cast("dict[str, object]", node)
        return cast("Node", {key: anchored(one, folder, f"{path}.{key}") for key, one in section.items()})
    if isinstance(node, list):
        return cast("Node", [anchored(one, folder, path) for one in cast("list[object]", node)])
    if not isinstance(node, str):
        return node
    names_a_file = node and path.endswith(tuple(f".{key}" for key in FILES))
    there = names_a_file and glob(node, root_dir=folder)
    return cast("Node", str((folder / node).absolute())) if there else node


@dataclass(frozen=True)
class Recipe:
    """A merged tree and its files, in increasing order of precedence.

    ancestors: for each file, the number of preceding files that its `defaults:` names, directly or through other files.
    arguments: origins of keys that are not set in a file, such as arguments in Python.
    """

    tree: DictConfig
    files: tuple[Path, ...]
    ancestors: tuple[int, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict[str, str])

    def under(self, tree: Mapping[str, object], arguments: Mapping[str, str]) -> "Recipe":
        """Return the recipe with a tree's keys in place of its own; arguments: their origins."""
        above = OmegaConf.create(dict(tree))
        return replace(self, tree=_merged(self.tree, above), arguments={**self.arguments, **arguments})


def read_recipe(path: str | Path) -> Recipe:
    """Read a file and merge it over the files in its `defaults:`; raises ConfigError with the chain of files.

    A name without a file refers to a recipe shipped with the package.
    """
    return _read(recipe_file(Path(), path), (), [])


def _read(path: Path, chain: tuple[Path, ...], read: list[Path]) -> Recipe:
    """Read a file; chain: files that lead to it. read: all files read before it; a file named twice is read twice."""
    chain = (*chain, path)
    read.append(path)
    if len(read) > _MOST_FILES:
        what = f"`defaults:` leads to more than {_MOST_FILES} files"
        raise _refuse(chain, "too-large", what, "name fewer")
    if path.resolve() in [ancestor.resolve() for ancestor in chain[:-1]]:
        raise _refuse(chain, "reference", "the file is its own ancestor", "remove the cycle from `defaults:`")
    tree = _parse(path, chain)
    merged, files, ancestors = OmegaConf.create(), (), ()
    for parent in _parents(tree.pop("defaults", None), chain):
        recipe = _read(recipe_file(path.parent, parent), chain, read)
        merged, files = _merged(merged, recipe.tree), (*files, *recipe.files)
        ancestors = (*ancestors, *recipe.ancestors)
    return Recipe(_merged(merged, tree), (*files, path), (*ancestors, len(files)))


_MOST_FILES = 100
"""Maximum files of a recipe, since files that each name others twice are read exponentially often."""


def _merged(below: DictConfig, above: DictConfig) -> DictConfig:
    """Merge two trees key by key; a list replaces a section, and a section replaces a list.

    The arguments must not be used afterwards, since the result shares their nodes.
    """
    _make_room(below, above)
    return cast("DictConfig", OmegaConf.unsafe_merge(below, above))


_REPLACES = "_override_"
"""Key that, if true, makes a section replace its parent's section instead of merging, as in NeMo RL."""


def _make_room(below: DictConfig, above: DictConfig) -> None:
    for key in list(above):
        old, new = (tree._get_node(key) for tree in (below, above))  # pyright: ignore[reportPrivateUsage]
        replaces = isinstance(new, DictConfig) and new.pop(_REPLACES, False)
        if isinstance(old, DictConfig) and isinstance(new, DictConfig) and not replaces:
            _make_room(old, new)
        elif isinstance(old, DictConfig | ListConfig) and isinstance(new, DictConfig | ListConfig):
            del below[key]


def _parse(path: Path, chain: tuple[Path, ...]) -> DictConfig:
    try:
        values = yaml.load(read_yaml_text(path), Loader=RecipeLoader)
        if isinstance(values, dict | None):
            return OmegaConf.create(anchored(cast("dict[str, object]", values or {}), path.parent))
    except FileNotFoundError:
        raise _refuse(chain, "not-found", "no such file", _NO_SUCH_FILE) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _refuse(chain, "not-readable", f"cannot be read: {error}", "name a YAML file") from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        what, remedy = _told(error, path)
        raise _refuse(chain, "not-readable", f"is not valid YAML: {what}", remedy) from error
    except ValueError as error:
        raise _refuse(chain, "wrong-kind", f"is not a recipe: {error}", "name a recipe") from error
    raise _refuse(chain, "wrong-kind", "has no keys at its top level", "write a recipe: sections with keys")


_NO_SUCH_FILE = (
    "check the path (a relative one starts at the file), or take one that `nemo-rl-mcore recipes` lists"
)


def _told(error: Exception, path: Path) -> tuple[str, str]:
    """Return a text's error and remedy; a tab, which is invisible, is named."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is not None:
        line = path.read_text(encoding="utf-8").split("\n")[mark.line : mark.line + 1]
        if "".join(line)[mark.column : mark.column + 1] == "\t":
            what = f"line {mark.line + 1}, column {mark.column + 1}: a tab; indent lines with spaces only"
            return what, "put spaces in its place"
    return " ".join(str(error).split()), "correct it"


def _parents(defaults: object, chain: tuple[Path, ...]) -> list[str]:
    entries = [defaults] if isinstance(defaults, str) else [] if defaults is None else defaults
    plain = OmegaConf.to_container(entries) if OmegaConf.is_config(entries) else entries
    names = cast("list[object]", plain) if isinstance(plain, list) else [None]
    if any(not isinstance(name, str) for name in names):
        raise _refuse(
            chain, "not-allowed", "`defaults:` is not a path or a list of paths", "name the parent files"
        )
    return cast("list[str]", names)


def _refuse(chain: tuple[Path, ...], code: Code, what: str, remedy: str) -> ConfigError:
    names = [str(path) for path in chain]
    if len(names) > 2 * _SHOWN:
        names[_SHOWN:-_SHOWN] = ["..."]
    return refused(code, " -> ".join(names), what, remedy)


_SHOWN = 4
"""Number of files shown at either end of a long chain."""


@dataclass(frozen=True)
class Origin:
    """Origin of a key: the file's index in the recipe, file and line for messages, and the value.

    text: the value as written; empty for a list.
    """

    file: int
    where: str
    text: str


def origins(files: Iterable[Path]) -> dict[str, Origin]:
    """Return each key's origin in the file with the highest precedence that sets it."""
    found: dict[str, Origin] = {}
    parents = set[str]()
    for key, origin, is_section in _settings(files):
        if key in parents and not is_section:  # drop earlier files' keys of a section that is now null
            found = {other: origin for other, origin in found.items() if not other.startswith(f"{key}.")}
        found[key] = origin
        parents.add(key.rpartition(".")[0])
    return found


def taken_back(recipe: Recipe) -> dict[str, Origin]:
    """Return each key's last setting that was replaced by a file which does not inherit from the setting's file.

    With `defaults: [a.yaml, b.yaml]`, the parents of b.yaml take precedence over a.yaml.
    """
    strongest, lost = origins(recipe.files), dict[str, Origin]()
    for key, origin, is_section in _settings(recipe.files):
        last = strongest.get(key)
        if last is None or is_section or origin.text == last.text:
            continue
        inherits = last.file - recipe.ancestors[last.file] <= origin.file <= last.file
        if not inherits:
            lost[key] = origin
    return lost


def _settings(files: Iterable[Path]) -> Iterator[tuple[str, Origin, bool]]:
    """Yield each key in each file with its origin, and True for a section."""
    for place, path in enumerate(files):
        node = yaml.CSafeLoader(path.read_text(encoding="utf-8")).get_single_node()
        for key, line, value in key_lines(node, ""):
            text = value.value if isinstance(value, yaml.ScalarNode) else ""
            yield key, Origin(place, f"{path}:{line}", text), isinstance(value, yaml.MappingNode)


def places(recipe: Recipe, overridden: Iterable[str]) -> dict[str, str]:
    """Return each key's location: file and line, argument, or (for enclosing sections too) command line."""
    lines = {key: origin.where for key, origin in origins(recipe.files).items()}
    lines |= recipe.arguments
    return lines | {
        section: COMMAND_LINE for path in overridden for section in accumulate(path.split("."), join_path)
    }


def key_lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int, yaml.Node]]:
    """Yield the path, line number (from 1) and value of each key below a node."""
    if isinstance(node, yaml.SequenceNode):
        for place, one in enumerate(cast("list[yaml.Node]", node.value)):
            path = join_path(prefix, str(place))
            yield path, one.start_mark.line + 1, one
            yield from key_lines(one, path)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
        path = join_path(prefix, str(key.value))
        yield path, key.start_mark.line + 1, value
        yield from key_lines(value, path)


def apply_overrides(
    tree: DictConfig, overrides: Iterable[str], is_foreign: Callable[[str], bool]
) -> tuple[list[str], list[Problem]]:
    """Apply overrides in Hydra's grammar (`a.b=c`, `+new=...`, `++any=...`, `~gone`).

    is_foreign: returns True for a key that only NeMo RL has; such a key is set here without an error.
    Returns the overridden paths and their problems.
    """
    texts = list(overrides)
    if not texts:
        return [], []
    # Imported here: the grammar's parser is a third of the time of a preflight without overrides.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, paths, problems = OverridesParser.create(), list[str](), list[Problem]()
    kind = kind_of(cast("dict[str, object]", OmegaConf.to_container(tree, resolve=False)))
    for text in texts:
        try:
            require_shallow(text)
            override = parser.parse_override(text)
        except (HydraException, ValueError, RecursionError) as error:
            what = f"is not an override ({str(error).splitlines()[0]})"
            problems.append(_wrong("not-allowed", text, what, "write key=value, without spaces around ="))
            continue
        paths += key_paths({override.key_or_group: override.value()})
        problem = _apply(tree, override, lambda path: is_known(path, kind) or is_foreign(path), kind)
        if problem is not None:
            problems.append(problem)
    return paths, problems


COMMAND_LINE = "command line"


_wrong = partial(Problem, where=COMMAND_LINE)


def _apply(
    tree: DictConfig, override: "Override", may_be_set: Callable[[str], bool], kind: Kind
) -> Problem | None:
    path = override.key_or_group
    exists = path in key_paths(cast("dict[str, object]", OmegaConf.to_container(tree, resolve=False)))
    if override.is_sweep_override() or override.package is not None:
        return _wrong(
            "not-supported", path, "sweeps and config groups are not supported", "set a single value"
        )
    if override.is_delete():
        return _delete(tree, override, exists, kind)
    if override.is_add() and exists:
        return _wrong("already-there", path, "is already set", f"write it without the +, {path}=...")
    creates = override.is_add() or override.is_force_add()
    if not creates and not exists and not may_be_set(path):
        return _wrong("unknown-key", path, "unknown key", suggestion(path, kind))
    try:
        OmegaConf.update(tree, path, override.value(), merge=True, force_add=True)
    except OmegaConfBaseException as error:
        return _wrong("not-allowed", path, f"cannot be set: {str(error).splitlines()[0]}")
    return None


def _delete(tree: DictConfig, override: "Override", exists: bool, kind: Kind) -> Problem | None:
    path = override.key_or_group
    if not exists:
        remedy = "remove the override" if is_known(path, kind) else suggestion(path, kind)
        return _wrong("not-found", path, "cannot be deleted, because the recipe does not set it", remedy)
    parent, _, key = path.rpartition(".")
    section = OmegaConf.select(tree, parent) if parent else tree
    expected, found = override.value(), section[key]
    if expected is not None and expected != found:
        what = f"cannot be deleted as ~{path}={expected}, because its value is {found!r}"
        return _wrong("contradicts", path, what, f"write ~{path}")
    del section[key]
    return None


def key_paths(tree: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yield the paths of all sections and keys, with list indices as keys."""
    for key, value in tree.items():
        path = join_path(prefix, str(key))
        yield path
        inner = dict(enumerate(cast("list[object]", value))) if isinstance(value, list) else value
        if isinstance(inner, Mapping):
            yield from key_paths(cast("Mapping[str, object]", inner), path)
