"""Where a recipe comes from: YAML files joined by `defaults:`, then command-line overrides."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from glob import glob
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rl_mcore.config.base import Code, ConfigError, Problem, join_path
from nemo_rl_mcore.config.master import kind_of
from nemo_rl_mcore.recipe.schema import Kind, is_known, suggestion
from nemo_rl_mcore.recipe.shipped import shipped_recipe
from nemo_rl_mcore.recipe.yaml_text import read_yaml_text, require_shallow, values_of

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

FILES = ("data_path", "prompt_file", "system_prompt_file", "tokenizer.name", "endpoint.command")
"""Keys, wherever they stand, whose file is looked for beside the recipe, and else where the command is started."""


def recipe_file(folder: Path, name: str | Path) -> Path:
    """Return the recipe of that name: a file seen from the folder, or else one that is shipped."""
    path = folder / name
    return path if path.exists() else shipped_recipe(name) or path


def anchored(tree: dict[str, object], folder: Path, prefix: str = "") -> dict[str, object]:
    """Return the tree of a recipe, with the paths that start at its folder made absolute."""
    return {key: _anchored(value, folder, f"{prefix}.{key}") for key, value in tree.items()}


def _anchored(node: object, folder: Path, path: str) -> object:
    if isinstance(node, dict):
        return anchored(cast("dict[str, object]", node), folder, path)
    if isinstance(node, list):
        return [_anchored(value, folder, path) for value in cast("list[object]", node)]
    if not isinstance(node, str):
        return node
    names_a_file = node and path.endswith(tuple(f".{key}" for key in FILES))
    return str((folder / node).absolute()) if names_a_file and glob(node, root_dir=folder) else node


@dataclass(frozen=True)
class Recipe:
    """The merged tree, and the files it was merged from, the strongest last.

    ancestors: of each file, how many of those before it are named by its `defaults:`, at once or by another one.
    arguments: where a key is set that no file has, such as an argument in Python.
    """

    tree: DictConfig
    files: tuple[Path, ...]
    ancestors: tuple[int, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict[str, str])

    def under(self, tree: Mapping[str, object], arguments: Mapping[str, str]) -> "Recipe":
        """Return the recipe with the keys of a tree over its own, and what says of each where it is set."""
        above = OmegaConf.create(dict(tree))
        return replace(self, tree=_merged(self.tree, above), arguments={**self.arguments, **arguments})


def read_recipe(path: str | Path) -> Recipe:
    """Read a file and, under it, what its `defaults:` names; raises ConfigError with the chain of files.

    A name that is no file is that of a recipe that comes with the package.
    """
    return _read(recipe_file(Path(), path), (), [])


def _read(path: Path, chain: tuple[Path, ...], read: list[Path]) -> Recipe:
    """Read a file; chain: those that lead to it. read: all before it, of which those named twice are read twice."""
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
"""Of one recipe; files that each name two others twice are read exponentially often."""


def _merged(below: DictConfig, above: DictConfig) -> DictConfig:
    """Return both, key by key; a list takes the place of a section, and a section that of a list.

    What was given is not to be used any more: it is in the result.
    """
    _make_room(below, above)
    return cast("DictConfig", OmegaConf.unsafe_merge(below, above))


_REPLACES = "_override_"
"""Set to true in a section, it takes the place of the parent's, as in NeMo RL."""


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
        values = values_of(read_yaml_text(path))
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
        raise _refuse(chain, "wrong-kind", f"is no recipe: {error}", "name a recipe") from error
    raise _refuse(chain, "wrong-kind", "holds no keys at its top level", "write a recipe: sections with keys")


_NO_SUCH_FILE = (
    "check the path (a relative one starts at the file), or take one that `nemo-rl-mcore recipes` lists"
)


def _told(error: Exception, path: Path) -> tuple[str, str]:
    """Return what is wrong with a text, and what to do; a tab, which cannot be seen, is called one."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is not None:
        line = path.read_text(encoding="utf-8").split("\n")[mark.line : mark.line + 1]
        if "".join(line)[mark.column : mark.column + 1] == "\t":
            what = f"line {mark.line + 1}, column {mark.column + 1}: a tab, and lines are indented by spaces alone"
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
    return ConfigError([Problem(code, " -> ".join(names), what, remedy)])


_SHOWN = 4
"""Files at either end of a long chain."""


@dataclass(frozen=True)
class Origin:
    """Where a key is set: the place of the file among those of the recipe, file and line for a message, and the value.

    text: a value as it is written; empty for a list.
    """

    file: int
    where: str
    text: str


def origins(files: Iterable[Path]) -> dict[str, Origin]:
    """Return for each key which of the files sets it; of several, the strongest."""
    found: dict[str, Origin] = {}
    parents = set[str]()
    for key, origin, is_section in _settings(files):
        if key in parents and not is_section:  # what files before say of a section that is null now
            found = {other: origin for other, origin in found.items() if not other.startswith(f"{key}.")}
        found[key] = origin
        parents.add(key.rpartition(".")[0])
    return found


def taken_back(recipe: Recipe) -> dict[str, Origin]:
    """Return for each key the strongest setting that another file took the place of, and not one that inherits it.

    Of `defaults: [a.yaml, b.yaml]`, b.yaml brings its own parents: what these say comes after a.yaml.
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
    """Yield each key of each file, where it is set, and whether it is a section."""
    for place, path in enumerate(files):
        node = yaml.CSafeLoader(path.read_text(encoding="utf-8")).get_single_node()
        for key, line, value in key_lines(node, ""):
            text = value.value if isinstance(value, yaml.ScalarNode) else ""
            yield key, Origin(place, f"{path}:{line}", text), isinstance(value, yaml.MappingNode)


def places(recipe: Recipe, overridden: Iterable[str]) -> dict[str, str]:
    """Return where each key is set: file and line, argument, or command line, which counts for its sections too."""
    lines = {key: origin.where for key, origin in origins(recipe.files).items()}
    lines |= recipe.arguments
    return lines | {
        section: COMMAND_LINE for path in overridden for section in accumulate(path.split("."), join_path)
    }


def key_lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int, yaml.Node]]:
    """Yield the path of each key below a node, the line on which it stands, from 1, and its value."""
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
    """Change the tree by Hydra's grammar (`a.b=c`, `+new=...`, `++any=...`, `~gone`).

    is_foreign: of keys that are set although none of ours, for others to judge.
    Gives the paths that were named, and what is wrong with them.
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
            reason = str(error).splitlines()[0]
            problems.append(
                Problem(
                    "not-allowed",
                    text,
                    f"is not an override ({reason})",
                    "write key=value, without spaces around =",
                    where=COMMAND_LINE,
                )
            )
            continue
        paths += _paths({override.key_or_group: override.value()}, "")
        problem = _apply(tree, override, lambda path: is_known(path, kind) or is_foreign(path), kind)
        if problem is not None:
            problems.append(problem)
    return paths, problems


COMMAND_LINE = "command line"


def _apply(
    tree: DictConfig, override: "Override", may_be_set: Callable[[str], bool], kind: Kind
) -> Problem | None:
    path = override.key_or_group
    exists = path in _paths(cast("dict[str, object]", OmegaConf.to_container(tree, resolve=False)), "")
    if override.is_sweep_override() or override.package is not None:
        return Problem(
            "not-supported",
            path,
            "sweeps and config groups are not supported",
            "give one value",
            where=COMMAND_LINE,
        )
    if override.is_delete():
        return _delete(tree, override, exists, kind)
    if override.is_add() and exists:
        return Problem(
            "already-there", path, "is already set", f"write it without the +, {path}=...", where=COMMAND_LINE
        )
    creates = override.is_add() or override.is_force_add()
    if not creates and not exists and not may_be_set(path):
        return Problem("unknown-key", path, "unknown key", suggestion(path, kind), where=COMMAND_LINE)
    try:
        OmegaConf.update(tree, path, override.value(), merge=True, force_add=True)
    except OmegaConfBaseException as error:
        return Problem(
            "not-allowed", path, f"cannot be set: {str(error).splitlines()[0]}", where=COMMAND_LINE
        )
    return None


def _delete(tree: DictConfig, override: "Override", exists: bool, kind: Kind) -> Problem | None:
    path = override.key_or_group
    if not exists:
        remedy = "remove the override" if is_known(path, kind) else suggestion(path, kind)
        return Problem(
            "not-found",
            path,
            "cannot be deleted, because the recipe does not set it",
            remedy,
            where=COMMAND_LINE,
        )
    parent, _, key = path.rpartition(".")
    section = OmegaConf.select(tree, parent) if parent else tree
    expected = override.value()
    if expected is not None and expected != section[key]:
        return Problem(
            "contradicts",
            path,
            f"cannot be deleted, because its value is {section[key]!r} and not {expected!r}",
            f"write ~{path}",
            where=COMMAND_LINE,
        )
    del section[key]
    return None


def _paths(tree: dict[str, object], prefix: str) -> Iterator[str]:
    for key, value in tree.items():
        path = join_path(prefix, str(key))
        yield path
        inner = dict(enumerate(cast("list[object]", value))) if isinstance(value, list) else value
        if isinstance(inner, dict):
            yield from _paths(cast("dict[str, object]", inner), path)
