"""Which cases of a test run each time, and which with `-m exhaustive`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

Values = set[tuple[str, str]]


def thin_out(items: Iterable[pytest.Item]) -> None:
    """Mark cases as exhaustive of tests that are marked so.

    each_value: all but those in which some value of some parameter, or of a case that is a dict, is a new one.
    quick_cases(id, ...): all but those of these ids.
    """
    seen: dict[str, Values] = defaultdict(set)
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        named = item.get_closest_marker("quick_cases")
        if named is not None and item.callspec.id not in named.args:
            item.add_marker(pytest.mark.exhaustive)
        if item.get_closest_marker("each_value") is not None:
            of_test, values = seen[item.nodeid.partition("[")[0]], _values(item)
            if values <= of_test:
                item.add_marker(pytest.mark.exhaustive)
            of_test |= values


def _values(item: pytest.Function) -> Values:
    return {
        (f"{name}.{key}", repr(part))
        for name, value in item.callspec.params.items()
        for key, part in (value.items() if isinstance(value, dict) else [("", value)])
    }
