"""Tiers of tests: which cases the markers leave to a later one, and that none is in two tiers or forgotten."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from thinning import EACH_TIME, TIERS, one_case_in

pytest_plugins = "pytester"

REPO = Path(__file__).parents[2]
OPTIONS = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]

SUITE = """
import pytest

def test_plain(): pass

@pytest.mark.nightly
def test_long(): pass

@pytest.mark.vllm
def test_engine(): pass

@pytest.mark.quick_cases("a")
@pytest.mark.parametrize("case", "abc")
def test_quick(case): pass

@pytest.mark.exhaustive_cases("b")
@pytest.mark.parametrize("case", "abc")
def test_exhaustive(case): pass

@pytest.mark.quick_cases("a")
@pytest.mark.exhaustive_cases("b")
@pytest.mark.parametrize("case", "abc")
def test_both(case): pass

@pytest.mark.each_value
@pytest.mark.parametrize(("first", "second"), ["ac", "ad", "bc", "bd"])
def test_values(first, second): pass
@pytest.mark.stage("docs")
def test_page(): pass

@pytest.mark.stage("docs")
@pytest.mark.exhaustive
def test_every_page(): pass

@pytest.mark.stage("distributed")
@pytest.mark.smoke
def test_ranks(): pass

@pytest.mark.stage("distributed")
@pytest.mark.smoke("b")
@pytest.mark.parametrize("case", "ab")
def test_layout(case): pass
"""
SELECTED = {
    EACH_TIME: "plain quick[a] both[a] values[a-c] values[a-d] values[b-c] ranks layout[b]",
    "exhaustive": "quick[b] quick[c] exhaustive[b] both[b] values[b-d] every_page",
    "nightly": "long exhaustive[a] exhaustive[c] both[c]",
    "vllm": "engine",
    "distributed": "layout[a]",
    "docs": "page",
    "processes": "",
}


@pytest.fixture
def ran(pytester):
    """The tests that pytest runs with some options."""
    pytester.makeconftest(
        "from thinning import has_stages, thin_out\n"
        "import pytest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(config, items): thin_out(items, stages=has_stages(config))\n"
    )
    pytester.makeini("[pytest]\nmarkers =\n" + "".join(f"    {marker}\n" for marker in OPTIONS["markers"]))
    file = pytester.mkdir("tests") / "test_suite.py"
    file.write_text(SUITE)

    def run(*options):
        passed, *others = pytester.inline_run("--strict-markers", *options).listoutcomes()
        assert others == [[], []]
        return " ".join(report.nodeid.partition("::test_")[2] for report in passed)

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("expression", SELECTED)
def test_the_markers_leave_cases_to_their_tiers(ran, expression):
    assert ran("-m", expression, "tests") == SELECTED[expression]


@pytest.mark.exhaustive
def test_who_names_a_file_runs_what_it_has_of_a_stage(ran):
    plain = SELECTED[EACH_TIME].removesuffix(" ranks layout[b]")
    assert ran("-m", EACH_TIME, "tests/test_suite.py") == f"{plain} page ranks layout[a] layout[b]"
    assert ran("-m", "docs", "tests/test_suite.py") == "page"


@pytest.mark.exhaustive
def test_one_in_n_cases_of_each_test_are_kept_and_each_test_without_cases():
    ids = ["a.py::one[1]", "a.py::one[2]", "a.py::two", "a.py::one[3]", "b.py::one[1]", "a.py::one[4]"]
    items = {name: SimpleNamespace(nodeid=name) for name in ids}
    kept = one_case_in(2, items.values())
    assert [name for name, item in items.items() if item in kept] == [
        *("a.py::one[1]", "a.py::two", "a.py::one[3]", "b.py::one[1]")
    ]


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
