"""The findings of parts as tables for docs/support.md; see `report` for where they come from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def is_ok(content: Mapping[str, Any]) -> bool:
    """Whether a part ran to its end, checked something and found nothing wrong, or was skipped."""
    checked = bool(content["checks"]) or "skipped" in content
    return not content["doing"] and checked and all(check["ok"] for check in content["checks"])


def markdown(contents: Sequence[Mapping[str, Any]]) -> str:
    """The parts as tables for docs/support.md; what failed is told below them."""
    lines: list[str] = []
    for content in contents:
        versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
        lines += [
            f"### {content['part']}: {content['device']}",
            "",
            f"{versions}; {content['seconds']} s",
            "",
        ]
        if "skipped" in content:
            lines += [f"skipped: {content['skipped']}", ""]
            continue
        lines += [*_check_table(content["checks"]), ""]
        for table in dict.fromkeys(figure["table"] for figure in content["figures"]):
            lines += [*_figure_table(table, content["figures"]), ""]
        lines += [*_failures(content["checks"])]
    return "\n".join(lines)


def _check_table(checks: list[dict[str, Any]]) -> list[str]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for check in checks:
        groups.setdefault(check["group"], []).append(check)
    rows = ["| check | cases | largest difference | allowed | |", "| --- | --- | --- | --- | --- |"]
    for group, found in groups.items():
        failed = sum(not check["ok"] for check in found)
        worst = max(found, key=_closeness)
        cells = [group, str(len(found)), *(_number(worst[key]) for key in ("difference", "tolerance"))]
        rows.append(f"| {' | '.join([*cells, f'{failed} FAILED' if failed else 'ok'])} |")
    return rows


def _closeness(check: Mapping[str, Any]) -> float:
    """How near a check came to its tolerance; beyond all others when it gave no difference."""
    if check["difference"] is None:
        return math.inf
    allowed = check["tolerance"]
    return check["difference"] / allowed if allowed else math.inf if check["difference"] else 0.0


def _figure_table(table: str, figures: list[dict[str, Any]]) -> list[str]:
    rows = [{k: v for k, v in row.items() if k != "table"} for row in figures if row["table"] == table]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [f"| {' | '.join([table, *columns[1:]])} |", f"|{' --- |' * len(columns)}"]
    return lines + [f"| {' | '.join(_number(row.get(column)) for column in columns)} |" for row in rows]


def _number(value: str | float | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.3g}"


def _failures(checks: list[dict[str, Any]]) -> list[str]:
    return [
        f"FAILED {check['group']}: {check['case']}: "
        + (check["error"] or f"{check['difference']:.3g} is above {check['tolerance']:.3g}")
        for check in checks
        if not check["ok"]
    ]
