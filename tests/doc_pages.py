"""The project's pages as tests read them: texts by path, blocks by language, prose without its blocks."""

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

REPO = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(REPO)): path.read_text("utf-8")
    for path in (*REPO.glob("*.md"), *sorted((REPO / "docs").rglob("*.md")))
}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language):
    """(page, first line in the page, text) of every block of a language."""
    return [
        (page, text.count("\n", 0, match.start(2)), match[2])
        for page, text in PAGES.items()
        for match in BLOCK.finditer(text)
        if match[1] == language
    ]


def prose(page):
    return BLOCK.sub("", PAGES[page])


def in_backticks(page):
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))


def imported(path):
    """The module of a file that is on no path."""
    spec = spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
