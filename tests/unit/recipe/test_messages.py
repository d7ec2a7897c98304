"""What wrong recipes are told, word for word: messages.yaml, whose messages `pytest --write-messages` rewrites."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import yaml

from nemo_rl_mcore.config import ConfigError, Problem
from nemo_rl_mcore.config.base import Code
from nemo_rl_mcore.recipe.load import load_with_warnings

FILE = Path(__file__).with_name("messages.yaml")
CASES = yaml.safe_load(FILE.read_text("utf-8"))
ELSEWHERE = {
    "disk-full": "a folder",
    "not-installed": "a package",
    "not-readable": "a file",
    "not-writable": "a folder",
    "other-model": "a checkpoint",
    "too-few-rows": "a file",
    "wrong-kind": "a file",
    "wrong-row": "a file",
}
"""Codes that need more than a recipe and overrides, and what."""


def message(problem: Problem) -> dict[str, Any]:
    related = {"related": list(problem.related)} if problem.related else {}
    return {"code": problem.code, "says": str(replace(problem, where="")), **related}


def messages(recipe: str, overrides: list[str], exemplar: Path) -> list[dict[str, Any]]:
    """What is wrong, or has no effect."""
    try:
        _, problems = load_with_warnings(exemplar.with_name(recipe), overrides)
    except ConfigError as error:
        problems = error.problems
    return [message(problem) for problem in problems]


def test_each_wrong_recipe_is_told_what_the_file_says(exemplar, pytestconfig):
    found = [{**case, "problems": messages(case["recipe"], case["set"], exemplar)} for case in CASES]
    if pytestconfig.getoption("--write-messages"):
        FILE.write_text(yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=10**6), "utf-8")
    else:
        assert found == CASES


def test_each_code_has_a_message():
    here = {problem["code"] for case in CASES for problem in case["problems"]}
    assert here.isdisjoint(ELSEWHERE)
    assert here | set(ELSEWHERE) == set(get_args(Code.__value__))
