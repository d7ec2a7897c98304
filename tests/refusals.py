"""What a test says of a refusal: its code, and the keys, paths and numbers in its message, not the words."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import pytest

from nemo_rl_mcore.config import ConfigError, RunConfig
from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.errors import CodedError


@contextmanager
def refused(
    code: str, *parts: object, by: type[CodedError] = CodedError
) -> Iterator[pytest.ExceptionInfo[CodedError]]:
    """Expect an error of this code whose message holds the parts; whole numbers stand in it as they are given."""
    with pytest.raises(by) as caught:
        yield caught
    assert_refused(caught.value, code, *parts)


def assert_refused(error: object, code: str, *parts: object) -> None:
    assert getattr(error, "code", "") == code, f"{error!r}"
    assert_holds(str(error), *parts)


def checked_run[Kind: RunConfig](kind: type[Kind], given: Mapping[str, object]) -> Kind:
    """Build a recipe from a mapping, and raise ConfigError with every rule that it breaks."""
    from nemo_rl_mcore.recipe.rules.runs import run_problems

    config = kind.model_validate(given)
    if wrong := tuple(problem for problem in run_problems(config) if not problem.warns):
        raise ConfigError(wrong)
    return config


@contextmanager
def wrong_key(expected: str, *parts: object) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """Expect a recipe to be refused with this first, written as in `brief`; the parts as in `refused`."""
    with pytest.raises(ConfigError) as caught:
        yield caught
    problem = caught.value.problems[0]
    assert brief(problem) == expected, str(problem)
    assert_holds(str(problem), *parts)


def brief(problem: Problem) -> str:
    """Return "key: code (end of the first related key)" of a problem, without what it does not have."""
    related = f" ({problem.related[0].rpartition('.')[2]})" if problem.related else ""
    return f"{problem.path}: {problem.code}{related}" if problem.path else f"{problem.code}{related}"


def briefs(problems: Iterable[Problem]) -> list[str]:
    return [brief(problem) for problem in problems]


def assert_holds(text: str, *parts: object) -> None:
    """Look for keys, paths and numbers in a text; whole numbers stand in it as they are given."""
    numbers = {int(number) for number in re.findall(r"(?<![\w.])-?\d+(?![\w.]*\w)", text)}
    absent = [part for part in parts if (part not in numbers if type(part) is int else str(part) not in text)]
    assert not absent, text
