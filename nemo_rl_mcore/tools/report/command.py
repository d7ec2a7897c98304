"""The command `report`, and the page that a run writes when it ends."""

import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_mcore.driver.observability.report import REPORT_FILE
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.tools.report.page import write_page
from nemo_rl_mcore.tools.report.run_data import read_run, told_apart

_COMPARISON_FILE = "comparison.html"


def run_report(folders: Sequence[str], output: str | None) -> int:
    """Write the page and tell its name; 2 where a folder is that of no run, or the file cannot be written."""
    once: dict[Path, Path] = {}
    for folder in map(Path, folders):
        once.setdefault(folder.resolve(), folder)
    paths = [*once.values()]
    default = paths[0] / REPORT_FILE if len(paths) == 1 else Path(_COMPARISON_FILE)
    try:
        runs = told_apart([read_run(path) for path in paths])
        page = write_page(runs, Path(output) if output else default)
    except ValueError as error:
        write_line(sys.stderr, f"report: {error}")
        return 2
    except OSError as error:
        write_line(sys.stderr, f"report: {error.filename or output or default}: {error.strerror}")
        return 2
    write_line(sys.stdout, str(page))
    return 0


def page_of_run(folder: Path) -> None:
    """Write the page of a run that ends; what fails is told, and changes nothing of how the run ends."""
    try:
        write_page([read_run(folder)], folder / REPORT_FILE)
    except Exception as error:  # noqa: BLE001 a page that cannot be made is no reason to fail what was trained
        write_line(sys.stderr, f"{folder / REPORT_FILE} was not written: {type(error).__name__}: {error}")
