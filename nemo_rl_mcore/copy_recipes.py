"""Recipes that come with the package, listed and copied."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.config.shipped import SHIPPED, shipped_folder, shipped_name, shipped_names, shipped_recipe

_FIRST_COMMENT = re.compile(r"# .*(\n# .*)*")
_NAMES_A_RECIPE = re.compile(r"^(\s*(?:defaults|warm_start): *)(\S+)$", re.MULTILINE)
_NAMES_A_FILE = re.compile(r"^\s*[\w.]+: *(\S+)$", re.MULTILINE)


def list_recipes() -> Iterator[str]:
    """Yield a line for each recipe: its name, and the first words of its comment, to a stop."""
    names = shipped_names()
    width = max(map(len, names))
    for name in names:
        comment = _FIRST_COMMENT.match((SHIPPED / name).read_text("utf-8"))
        words = comment[0].replace("\n#", "").removeprefix("# ") if comment else ""
        yield f"{name:{width}}  {re.split(r'(?<!Dr)[.:;](?= |$)', words)[0]}".rstrip()


def copy_recipes(name: str, destination: str | None) -> list[Path]:
    """Copy a recipe with the files beside it that it needs, or a folder of recipes; give the recipes that were written.

    What is above its folder is found in the package by name. Raises ConfigError, and then nothing is written.
    """
    source, files = _chosen(name)
    target = Path(destination or (source.name if source == SHIPPED / name else "."))
    copies = {path: target / path.relative_to(source) for path in files}
    there = [copy for copy in copies.values() if copy.exists()]
    if there:
        raise ConfigError([Problem("DEST", f"{there[0]} is there", "name another folder")])
    for path, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".yaml":
            copy.write_text(_by_name(path), "utf-8")
        else:
            shutil.copyfile(path, copy)
    return [copy for copy in copies.values() if copy.suffix == ".yaml"]


def _chosen(name: str) -> tuple[Path, list[Path]]:
    """The folder of what is copied, and its files."""
    folder = shipped_folder(name)
    if folder is not None:
        files = sorted(
            path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
        )
        return folder, files
    recipe = shipped_recipe(name)
    if recipe is None:
        raise ConfigError([Problem("NAME", f"no recipe {name!r}", "`nemo-rl-mcore recipes` lists them")])
    return recipe.parent, sorted({*_needed(recipe)})


def _needed(recipe: Path) -> Iterator[Path]:
    """Yield a recipe and the files beside it, or below its folder, that its values name."""
    yield recipe
    for name in _NAMES_A_FILE.findall(recipe.read_text("utf-8")):
        path = recipe.parent / name
        if ".." in Path(name).parts or not path.exists():
            continue
        if path.suffix == ".yaml":
            yield from _needed(path)
        else:
            yield from [path] if path.is_file() else (file for file in path.rglob("*") if file.is_file())


def _by_name(recipe: Path) -> str:
    """The text of a recipe, which names those above its folder as the package does."""

    def named(match: re.Match[str]) -> str:
        path = recipe.parent / match[2]
        above = ".." in Path(match[2]).parts
        return match[1] + (shipped_name(path) or match[2]) if above else match[0]

    return _NAMES_A_RECIPE.sub(named, recipe.read_text("utf-8"))
