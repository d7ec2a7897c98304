from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from nemo_rl_mcore.config.base import (
    ConfigError,
    Float,
    IntTuple,
    PositiveInt,
    Problem,
    Rule,
    Rules,
    StrictModel,
    broken,
    collect_problems,
)


class Inner(StrictModel):
    low: int = 0
    high: int = 1

    rules: ClassVar[Rules[Any]] = (
        Rule("too-large", "low", lambda own: own.low > own.high, ("high",), {"low": 1, "high": 2}),
    )


class Outer(StrictModel):
    inner: Inner = Inner()
    number: Float = 1.0
    count: PositiveInt = 1
    switch: bool = False
    ids: IntTuple | None = None

    rules: ClassVar[Rules[Any]] = (
        Rule("requires", "switch", lambda own: own.switch and own.count == 1, says="needs a count above 1"),
    )


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
        *({"number": value} for value in (True, "fast", float("nan"), "inf")),
        *({"count": value} for value in (True, "2", 2.0, 0)),
        *({"switch": value} for value in (1, "true")),
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


def test_problems_are_collected_from_all_sections_with_full_paths():
    config = Outer.model_validate({"inner": {"low": 2}, "switch": True})
    assert list(collect_problems(config)) == [
        Problem("requires", "switch", "needs a count above 1", "change one of them"),
        Problem(
            "too-large",
            "inner.low",
            "2 is too large for inner.high: 1",
            "set inner.low: 1, or inner.high: 2",
            ("inner.high",),
        ),
    ]


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (Rule("not-allowed", "count", True), "count: 1 is not allowed"),
        (Rule("missing", "ids", True, ("switch",)), "ids: is required with switch: false; set it"),
        (
            Rule("incompatible", "switch", True, ("inner", "count", "ids"), "drop it", "as all do"),
            "switch: false cannot be combined with inner, count: 1 and ids: null (as all do); drop it",
        ),
        (
            Rule("requires", "inner", True, ("inner", "number"), lambda own: {"number": own.number + 1}),
            "inner: this section is not allowed with number: 1.0; set number: 2.0",
        ),
        (
            Rule("no-signal", "number", True, why=lambda own: f"{own.count} of them"),
            "number: 1.0 leaves nothing to learn (1 of them)",
        ),
        (Rule("not-supported", "inner.low", True, says="of one's own"), "inner.low: of one's own; remove it"),
    ],
)
def test_the_message_of_a_rule_is_made_of_values(rule, told):
    (problem,) = broken((rule,), Outer())
    assert str(problem) == told


def test_rules_name_keys_where_the_recipe_has_them():
    rule = Rule("incompatible", "switch", True, ("count",), {"count": 2})
    (problem,) = broken((rule, lambda own: [Rule("missing", "ids", own.switch)]), Outer(), "policy.{}".format)
    assert str(problem) == "policy.switch: false cannot be combined with policy.count: 1; set policy.count: 2"
    assert problem.related == ("policy.count",)
