"""What recipes are told: messages.yaml, which `pytest --write-messages` rewrites; those with no problem load.

Each case has the codes and keys; those with words of their own, and one of each kind that is made of values, the words.
"""

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


def brief(problem: Problem) -> str:
    related = f" ({', '.join(problem.related)})" if problem.related else ""
    return f"{problem.path}: {problem.code}{related}"


def told(case: dict[str, Any], exemplar: Path) -> dict[str, Any]:
    """The case with what is wrong, or has no effect."""
    try:
        _, problems = load_with_warnings(exemplar.with_name(case.get("recipe", exemplar.name)), case["set"])
    except ConfigError as error:
        problems = error.problems
    says = {"says": [str(replace(problem, where="")) for problem in problems]} if "says" in case else {}
    return {**case, "problems": [brief(problem) for problem in problems], **says}


def test_each_wrong_recipe_is_told_what_the_file_says(exemplar, pytestconfig):
    found = [told(case, exemplar) for case in CASES]
    if pytestconfig.getoption("--write-messages"):
        text = yaml.safe_dump(
            found, sort_keys=False, allow_unicode=True, width=10**6, default_flow_style=None
        )
        FILE.write_text(text, "utf-8")
    else:
        assert found == CASES


def test_each_code_has_words_in_the_file():
    here = {
        problem.split(": ")[1].split()[0] for case in CASES if "says" in case for problem in case["problems"]
    }
    assert here.isdisjoint(ELSEWHERE)
    assert here | set(ELSEWHERE) == set(get_args(Code.__value__))
