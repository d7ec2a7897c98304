"""Tiers of tests: no test is in two of them, or forgotten; and what a run of them may cost."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from counting import ALLOWED, CPU, exceeded
from thinning import EACH_TIME, TIERS

REPO = Path(__file__).parents[2]
OPTIONS = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]


def test_what_is_in_no_tier_runs_each_time():
    options = shlex.split(OPTIONS["addopts"])
    assert options[options.index("-m") + 1] == EACH_TIME
    markers = {marker.partition(":")[0] for marker in OPTIONS["markers"]}
    assert markers - {"each_value", "quick_cases", "exhaustive_cases", "needs", "stage", "smoke"} == {*TIERS}


COLLECT = """
import json, sys
import pytest
from thinning import EACH_TIME, TIERS, one_case_in

class Listed:
    def pytest_collection_modifyitems(self, items):
        rows = []
        for item in items:
            marks = [mark for name in ("quick_cases", "exhaustive_cases", "smoke") for mark in item.iter_markers(name)]
            named = [name for mark in marks for name in mark.args]
            case = item.callspec.id if named else ""
            tiers = sorted({*TIERS} & {mark.name for mark in item.iter_markers()})
            rows.append((item.nodeid.partition("[")[0], case, named, tiers))
        with open(sys.argv[1], "w") as file:
            json.dump(rows, file)

sys.exit(pytest.main(["--collect-only", "-qq", "-n", "0", "-p", "no:cacheprovider", "-m", ""], plugins=[Listed()]))
"""


@pytest.mark.exhaustive
def test_every_test_is_in_one_tier_and_every_id_that_a_marker_names_is_that_of_a_case(tmp_path):
    listed = tmp_path / "tests.json"
    subprocess.run(
        [sys.executable, "-c", COLLECT, str(listed)],
        cwd=REPO, env={**os.environ, "PYTHONPATH": f"{REPO}:{REPO / 'tests'}"},
        stdout=subprocess.DEVNULL, timeout=300, check=True,
    )  # fmt: skip
    tests = json.loads(listed.read_text())
    assert len(tests) > 5000
    assert [test for test in tests if len(test[3]) > 1] == []
    cases, named = set(), set()
    for name, case, ids, _ in tests:
        cases.add((name, case))
        named |= {(name, one) for one in ids}
    assert named <= cases
    assert {tier for test in tests for tier in test[3]} == {*TIERS}


@pytest.mark.exhaustive
def test_counts_have_no_room_and_seconds_have_some():
    recorded = {"Ray sessions": 2, CPU: 100.0}
    assert exceeded({"Ray sessions": 2, CPU: 100.0 * ALLOWED}, recorded) == []
    more = exceeded({"Ray sessions": 3, CPU: 100.0 * ALLOWED + 1, "Megatron imports": 1}, recorded)
    assert len(more) == 3
