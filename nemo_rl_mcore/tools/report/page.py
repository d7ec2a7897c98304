"""The page: what is known of the runs as JSON, with the script that shows it, in one file that asks for no other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from nemo_rl_mcore.driver.own_files import replacing
from nemo_rl_mcore.tools.report.answers import steps_shown
from nemo_rl_mcore.tools.report.figures import curve_groups, other_metrics, stacked_phases, waterfall
from nemo_rl_mcore.tools.report.findings import Finding, findings_of
from nemo_rl_mcore.tools.report.run_data import RunData
from nemo_rl_mcore.tools.report.tables import differences, evaluations, faults, summary

_PARTS = files(__package__) / "web"
_SCRIPTS = ("script.js", "rollouts.js", "start.js")


def write_page(runs: Sequence[RunData], path: Path) -> Path:
    """Write the page of these runs; it is whole or not there. Raises OSError."""
    page = _page(runs).encode(errors="backslashreplace")
    try:
        with replacing(path) as file:
            file.write(page)
    except OSError as error:
        error.filename = str(path)
        raise
    return path


def _page(runs: Sequence[RunData]) -> str:
    parts = {
        "title": " and ".join(run.name for run in runs).translate(_HTML),
        "style": _part("style.css"),
        "plotly": (files("plotly") / "package_data" / "plotly.min.js").read_text("utf-8"),
        "data": _json(content_of(runs)),
        "script": "\n".join(map(_part, _SCRIPTS)),
    }
    # One pass over the template, so that nothing that was put in is taken for a place.
    pieces = _part("page.html").split("{{")
    return pieces[0] + "".join(
        parts[name] + rest for piece in pieces[1:] for name, _, rest in [piece.partition("}}")]
    )


def content_of(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return what the script shows, as JSON's values."""
    return {
        "version": version("nemo-rl-mcore"),
        "made": f"{datetime.now():%Y-%m-%d %H:%M}",
        "runs": [_run(run) for run in runs],
        "groups": curve_groups(runs),
        "others": other_metrics(runs),
        "differences": differences(runs) if len(runs) > 1 else [],
    }


def _run(run: RunData) -> dict[str, Any]:
    steps, unread = steps_shown(run.folder)
    findings = [*(Finding("warning", line) for line in unread), *findings_of(run)]
    return {
        "name": run.name,
        "folder": str(run.folder),
        "summary": summary(run),
        "findings": [vars(finding) for finding in findings],
        "waterfall": waterfall(run.rows),
        "phases": stacked_phases(run.rows),
        "steps": steps,
        "evaluations": evaluations(run),
        "faults": faults(run),
        "recipe": run.recipe_text,
    }


def _part(name: str) -> str:
    return (_PARTS / name).read_text("utf-8")


_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})
_JSON_IN_HTML = str.maketrans({"<": "\\u003c", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def _json(value: object) -> str:
    """As it may stand in a script element: no text of an answer ends it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(
        _JSON_IN_HTML
    )
