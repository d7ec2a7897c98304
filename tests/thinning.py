"""Which cases of a test run each time, which with `-m exhaustive`, and which with `-m nightly`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

Values = set[tuple[str, str]]

TIERS = ("exhaustive", "nightly", "vllm", "distributed", "docs", "processes")
"""A test is in one of them, or in none and runs each time."""
EACH_TIME = " and ".join(f"not {tier}" for tier in TIERS)
"""The default of pytest's option -m."""


def thin_out(items: Iterable[pytest.Item], *, stages: bool) -> None:
    """Mark the cases of tests that leave some of them to a later tier."""
    seen: dict[str, Values] = defaultdict(set)
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        tier = _tier_by_id(item)
        if tier:
            item.add_marker(tier)
        if item.get_closest_marker("each_value") is not None:
            of_test, values = seen[item.nodeid.partition("[")[0]], _values(item)
            if values <= of_test:
                item.add_marker(pytest.mark.exhaustive)
            of_test |= values
        stage = item.get_closest_marker("stage")
        if stages and stage and not _is_smoke(item) and not any(map(item.get_closest_marker, TIERS)):
            item.add_marker(stage.args[0])


def one_case_in(n: int, items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return one in n cases of each test, the first among them; a test without cases is one case."""
    cases, kept = Counter[str](), list[pytest.Item]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if cases[test] % n == 0:
            kept.append(item)
        cases[test] += 1
    return kept


def has_stages(config: pytest.Config) -> bool:
    """Return False for who names files or tests and no tier: these run, whatever stage they are of."""
    names_files = any(Path(argument.partition("::")[0]).name != "tests" for argument in config.args)
    return not names_files or config.option.markexpr != EACH_TIME


def _is_smoke(item: pytest.Function) -> bool:
    smoke = item.get_closest_marker("smoke")
    return smoke is not None and (not smoke.args or item.callspec.id in smoke.args)


def _tier_by_id(item: pytest.Function) -> str:
    """Empty where the ids leave the case as it is."""
    quick, exhaustive = (item.get_closest_marker(name) for name in ("quick_cases", "exhaustive_cases"))
    if quick is None and exhaustive is None:
        return ""
    if quick is not None and item.callspec.id in quick.args:
        return ""
    return "exhaustive" if exhaustive is None or item.callspec.id in exhaustive.args else "nightly"


def _values(item: pytest.Function) -> Values:
    return {
        (f"{name}.{key}", repr(part))
        for name, value in item.callspec.params.items()
        for key, part in (value.items() if isinstance(value, dict) else [("", value)])
    }
