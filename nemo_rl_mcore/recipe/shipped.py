"""The recipes shipped with the package (examples/configs), found by name from any directory."""

from pathlib import Path

SHIPPED = Path(__file__).parents[1] / "recipes"
"""In a source tree a link to examples/configs, in an installed package a copy of it."""


def shipped_names() -> list[str]:
    """Return all recipes' names: their paths within the folder."""
    return sorted(str(path.relative_to(SHIPPED)) for path in SHIPPED.rglob("*.yaml"))


def shipped_recipe(name: str | Path) -> Path | None:
    """Return the recipe with this name, with or without folder and `.yaml`; None if there is none, or more than one."""
    wanted = Path(f"{str(name).removesuffix('.yaml')}.yaml")
    if not _below(wanted):
        return None
    if (SHIPPED / wanted).is_file():
        return SHIPPED / wanted
    found = [*SHIPPED.rglob(wanted.name)] if len(wanted.parts) == 1 else []
    return found[0] if len(found) == 1 else None


def shipped_folder(name: str) -> Path | None:
    """Return the folder of recipes with this name; None if there is none."""
    folder = SHIPPED / name
    return folder if _below(Path(name)) and folder.is_dir() else None


def _below(name: Path) -> bool:
    return bool(name.parts) and not name.is_absolute() and ".." not in name.parts
