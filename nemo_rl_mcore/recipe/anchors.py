"""Paths that a recipe writes as they are seen from its own file, made to hold wherever it is read or saved."""

from glob import glob
from pathlib import Path
from typing import cast

from nemo_rl_mcore.recipe.shipped import shipped_recipe

FILES = ("data_path", "prompt_file", "system_prompt_file", "tokenizer.name", "endpoint.command", "gym.python")
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
