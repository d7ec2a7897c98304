"""Files of prompts that a recipe names: NeMo RL reads them where a command starts, mostly its repository's root."""

from collections.abc import Iterable
from pathlib import Path

from nemo_rl_mcore.config.source import TEXT_FILES
from nemo_rl_mcore.tools.migrate.draft import Draft, Kind, Note
from nemo_rl_mcore.tools.migrate.meaning import sources_of


def find_text_files(draft: Draft, recipes: Iterable[Path]) -> None:
    """Find each file where the command starts, or in a folder above a recipe; one that is not there is left open.

    recipes: the recipe, and the files of its `defaults:`.
    """
    folders = [Path(), *dict.fromkeys(folder for recipe in recipes for folder in recipe.absolute().parents)]
    for place, source in sources_of(draft):
        for key in TEXT_FILES:
            name, path = source.get(key), f"{place}.{key}"
            if not isinstance(name, str) or not name:
                continue
            found = next((folder / name for folder in folders if _is_file(folder / name)), None)
            if found is None:
                what = (
                    f"{name} is not there; write the path of that file, or copy it to where a command starts"
                )
                draft.notes.append(Note(Kind.OPEN, path, what))
            else:
                source[key] = str(found.absolute())
                draft.files[path] = found.absolute()


def copy_text_files(draft: Draft, target: Path) -> None:
    """Copy what was found next to our recipe `target`, which names the copies.

    A file that is there and says the same is left; of one that says something else the copy has the recipe's name
    before its own. Raises OSError.
    """
    for place, source in sources_of(draft):
        for key in TEXT_FILES:
            found = draft.files.get(f"{place}.{key}")
            if found is None:
                continue
            content = found.read_bytes()
            names = (found.name, f"{target.stem}_{found.name}")
            free = (target.with_name(name) for name in names)
            copy = next((path for path in free if not path.exists() or path.read_bytes() == content), None)
            if copy is None:
                raise FileExistsError(
                    17, "is there already, and is not overwritten", str(target.with_name(names[1]))
                )
            if not copy.exists():
                copy.write_bytes(content)
            source[key] = copy.name
            draft.notes.append(Note(Kind.FILES, f"{place}.{key}", f"{copy.name}, a copy of {found}"))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # such as a name that is too long, or has a NUL
        return False
