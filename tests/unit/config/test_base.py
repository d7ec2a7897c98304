from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from nemo_rl_mcore.config.base import (
    ConfigError,
    Float,
    IntTuple,
    PositiveInt,
    Problem,
    StrictModel,
    collect_problems,
)


class Inner(StrictModel):
    low: int = 0
    high: int = 1

    def problems(self) -> Iterator[Problem]:
        if self.low > self.high:
            yield Problem(
                "too-large", "low", f"{self.low} is above high: {self.high}", "swap them", ("high",)
            )


class Outer(StrictModel):
    inner: Inner = Inner()
    number: Float = 1.0
    count: PositiveInt = 1
    switch: bool = False
    ids: IntTuple | None = None

    def problems(self) -> Iterator[Problem]:
        if self.switch and self.count == 1:
            yield Problem("requires", "switch", "needs a count above 1")


def test_text_of_a_problem_names_path_fault_remedy_and_place():
    problem = Problem("not-divisible", "a.b", "3 is odd", "set it to 4", where="recipe.yaml:7")
    assert str(problem) == "a.b: 3 is odd; set it to 4  [recipe.yaml:7]"
    assert str(Problem("missing", "", "empty")) == "empty"


def test_config_error_lists_every_problem():
    error = ConfigError([Problem("missing", "a", "x"), Problem("missing", "b", "y")])
    assert str(error) == "2 problems in the configuration:\n  1. a: x\n  2. b: y"
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("text", ["1e-3", "0.001", " 1E-3 "])
def test_numbers_written_as_text_are_numbers(text):
    assert Outer(number=text).number == 0.001


@pytest.mark.parametrize(
    "given",
    [
        {"number": True},
        {"number": "fast"},
        {"number": float("nan")},
        {"number": "inf"},
        {"count": True},
        {"count": "2"},
        {"count": 2.0},
        {"count": 0},
        {"switch": 1},
        {"switch": "true"},
        {"ids": [1, True]},
        {"ids": 3},
        {"unknown": 1},
        {"inner": {"lowest": 1}},
        {"inner": 3},
    ],
)
def test_nothing_is_coerced_or_ignored(given):
    with pytest.raises(ValidationError):
        Outer.model_validate(given)


def test_integers_are_numbers_and_lists_are_tuples():
    config = Outer(number=2, ids=[3, 4])
    assert (config.number, config.ids) == (2.0, (3, 4))


def test_sections_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Outer().count = 2


def test_problems_are_collected_from_all_sections_with_full_paths():
    config = Outer.model_validate({"inner": {"low": 2}, "switch": True})
    assert list(collect_problems(config)) == [
        Problem("requires", "switch", "needs a count above 1"),
        Problem("too-large", "inner.low", "2 is above high: 1", "swap them", ("inner.high",)),
    ]
