"""The recipes shipped with the package (examples/configs): found by name from any directory, listed and copied."""

import filecmp
import re
import shutil
from collections.abc import Iterator
from os.path import normpath
from pathlib import Path

from nemo_rl_mcore.config.base import ConfigError, Problem

SHIPPED = Path(__file__).parents[1] / "recipes"
"""In a source tree a link to examples/configs, in an installed package a copy of it."""
_FIRST_COMMENT = re.compile(r"# .*(\n# .*)*")
_NAMES_A_FILE = re.compile(r"^\s*[\w.]+: *(\S+|\[.*\])$", re.MULTILINE)


def shipped_recipe(name: str | Path) -> Path | None:
    """Return the recipe with this name, with or without folder and `.yaml`; None if there is none, or more than one."""
    wanted = Path(f"{str(name).removesuffix('.yaml')}.yaml")
    if not _is_below(wanted):
        return None
    if (SHIPPED / wanted).is_file():
        return SHIPPED / wanted
    found = [*SHIPPED.rglob(wanted.name)] if len(wanted.parts) == 1 else []
    return found[0] if len(found) == 1 else None


def _is_below(name: Path) -> bool:
    return bool(name.parts) and not name.is_absolute() and ".." not in name.parts


def list_recipes() -> Iterator[str]:
    """Yield a line for each recipe: its path in the package, and its comment up to the first full stop."""
    names = sorted(str(path.relative_to(SHIPPED)) for path in SHIPPED.rglob("*.yaml"))
    width = max(map(len, names))
    for name in names:
        comment = _FIRST_COMMENT.match((SHIPPED / name).read_text("utf-8"))
        words = comment[0].replace("\n#", "").removeprefix("# ") if comment else ""
        first_sentence = re.split(r"(?<!Dr)[.:;](?= |$)", words)[0]
        yield f"{name:{width}}  {first_sentence}".rstrip()


def copy_recipes(name: str, destination: str | None) -> list[Path]:
    """Copy a recipe or a folder of recipes with all files they need, including parents; return the recipes written.

    Files keep their paths in the package, by which they refer to each other. Identical existing files are kept.
    Raises ConfigError before anything is written.
    """
    target = Path(destination or ".")
    copies = {path: target / path.relative_to(SHIPPED) for path in sorted({*_chosen(name)})}
    new = {path: copy for path, copy in copies.items() if not _is_there(path, copy)}
    if not new:
        raise ConfigError(
            [Problem("already-there", "DEST", f"all files of {name} already exist", "name another folder")]
        )
    for path, copy in new.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    return [copy for copy in new.values() if copy.suffix == ".yaml"]


def _is_there(path: Path, copy: Path) -> bool:
    if copy.is_file() and filecmp.cmp(path, copy, shallow=False):
        return True
    if copy.exists():
        raise ConfigError(
            [Problem("already-there", "DEST", f"{copy} already exists, and differs", "name another folder")]
        )
    return False


def _chosen(name: str) -> Iterator[Path]:
    """Yield the files to copy."""
    folder, recipe = SHIPPED / name, shipped_recipe(name)
    if _is_below(Path(name)) and folder.is_dir():
        files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        yield from files
        recipes = [path for path in files if path.suffix == ".yaml"]
    elif recipe is not None:
        recipes = [recipe]
    else:
        raise ConfigError(
            [Problem("not-found", "NAME", f"no recipe {name!r}", "`nemo-rl-mcore recipes` lists them")]
        )
    for path in recipes:
        yield from _needed(path)


def _needed(recipe: Path) -> Iterator[Path]:
    """Yield a recipe and, recursively, the files that its values name."""
    yield recipe
    values = _NAMES_A_FILE.findall(recipe.read_text("utf-8"))
    for name in [name for value in values for name in re.split(r"[\[\], ]+", value) if name]:
        path = Path(normpath(recipe.parent / name))
        if not path.is_relative_to(SHIPPED) or path == SHIPPED:
            continue
        if path.is_dir():
            yield from (file for file in path.rglob("*") if file.is_file())
        elif path.suffix == ".yaml" and path.is_file():
            yield from _needed(path)
        elif path.is_file():
            yield path
