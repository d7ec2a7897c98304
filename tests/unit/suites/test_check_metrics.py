import json
import math

import pytest
from test_suites.check_metrics import LONGEST_CHECK, CheckError, Metrics, main, parse_check, read_metrics

pytestmark = pytest.mark.stage("docs")

STEPS = 4
METRICS = {
    "train/loss": {"1": 4, "2": 2.5, "3": 1, "4": 0.5},
    "train/grad_norm": {"0": 100, "1": 1, "2": 3, "3": 5, "4": 7},
    "validation/accuracy": {"0": 0.125, "2": 0.25, "4": 0.75},
}


def holds(check, metrics=METRICS, steps=STEPS):
    return parse_check(check).evaluate(Metrics(metrics, steps))[0]


def refusal(check, metrics=METRICS, steps=STEPS):
    with pytest.raises(CheckError) as caught:
        parse_check(check).evaluate(Metrics(metrics, steps))
    return str(caught.value)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        ('data["train/loss"]["3"]', 1),
        ("data['validation/accuracy']['0']", 0.125),
        ('min(data["train/loss"])', 0.5),
        ('max(data["train/loss"])', 4),
        ('mean(data["train/loss"])', 2),
        ('median(data["train/loss"])', 1.75),
        ('mean(data["train/grad_norm"])', 4),  # step 0 is before the first update
        ('mean(data["train/grad_norm"], 0)', 23.2),
        ('mean(data["train/loss"], 2, 4)', 1.75),
        ('mean(data["train/loss"], -2)', 0.75),
        ('mean(data["train/loss"], -3, -1)', 1.75),
        ('mean(data["train/loss"], range_end=3)', 3.25),
        ('max(data["train/loss"], range_start=3)', 1),
        ('mean(data["validation/accuracy"], -1)', 0.75),
        ('min(data["validation/accuracy"])', 0.25),
        ('ratio_above(data["train/loss"], 1)', 0.75),  # at the threshold counts
        ('ratio_above(data["train/loss"], threshold=2, range_start=-2)', 0),
        ('-max(data["train/loss"]) * 2 + 1 / 4 - 0.25', -8),
        ('data["train/loss"]["1"] / data["train/loss"]["4"]', 8),
    ],
)
def test_numbers(number, expected):
    held, values = parse_check(f"{number} == {expected}").evaluate(Metrics(METRICS, STEPS))
    assert held, values
    assert values == [expected, expected]
    assert not holds(f"{number} != {expected}")


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ("1 < 2", True),
        ("2 < 2", False),
        ("2 <= 2", True),
        ("2 > 2", False),
        ("2 >= 2", True),
        ("1 < 2 < 3", True),
        ("1 < 3 < 2", False),
        ("3 < 2 < 4", False),
        ("1 < 2 and 2 < 1", False),
        ("2 < 1 and 1 < 2", False),
        ("1 < 2 and 2 < 3", True),
    ],
)
def test_comparisons(check, expected):
    assert holds(check) is expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"1": 1, "2": float("nan"), "3": 1}, "x at step 2 is nan, which is not finite"),
        ({"1": 1, "2": 1, "3": float("-inf")}, "x at step 3 is -inf, which is not finite"),
        ({"1": None, "2": 1, "3": 1}, "x at step 1 is null, no number"),
        ({"1": True, "2": 1, "3": 1}, "x at step 1 is true, no number"),
        ({"1": "1", "2": 1, "3": 1}, 'x at step 1 is "1", no number'),
        ({"1": 10**400, "2": 1, "3": 1}, "x at step 1: int too large to convert to float"),
        ({}, "x is empty"),
        ({"1": 1, "3": 1}, "x has no value at 1 of 3 steps: 2, ..."),
        ({"1": 1, "2": 1}, "x has no value at 1 of 3 steps: 3, ..."),
        ({"1": 1, "2": 1, "3": 1, "4": 1}, "x has a value at step 4, and the run has 3 steps"),
        ({"1": 1, "2": 1, "3": 1, "02": 1}, "x has a value at '02', which is no step"),
        ({"1": 1, "2": 1, "3": 1, "-1": 1}, "x has a value at '-1', which is no step"),
        ([1, 1, 1], "there is no metric 'x'"),
    ],
)
@pytest.mark.parametrize("check", ['max(data["x"]) > 0', 'data["x"]["3"] > 0', 'mean(data["x"], 3) > 0'])
def test_a_series_that_is_not_whole_fails_every_check_that_reads_it(values, message, check):
    assert refusal(check, {"x": values, "other": {"1": 1}}, steps=3) == message


def test_the_whole_of_a_series_must_be_finite_and_no_other_one():
    metrics = {"x": {"1": 1, "2": 1}, "other": {"1": None, "2": math.nan}}
    assert holds('max(data["x"]) == 1', metrics, steps=2)


def test_validations_may_skip_steps_but_not_the_one_that_is_asked_for():
    assert refusal('data["validation/accuracy"]["3"] > 0') == "validation/accuracy has no value at step 3"
    assert refusal('mean(data["validation/accuracy"], 3, 4) > 0').endswith("has no value at steps 3 to 3")
    bad = {"validation/accuracy": {"2": math.nan, "4": 1}}
    assert "not finite" in refusal('data["validation/accuracy"]["4"] > 0', bad)


def test_a_missing_metric_fails_wherever_it_stands():
    # Python would not look at the second part once the first is false.
    assert refusal('1 > 2 and data["train/gone"]["1"] > 0') == "there is no metric 'train/gone'"
    assert refusal('3 < 2 < max(data["train/gone"])') == "there is no metric 'train/gone'"


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ("1 / 0 > 1", "column 1: float division by zero"),
        ("1e308 * 10 > 1", "column 1 is inf, which is not finite"),
        ('0 < 1 / (data["train/loss"]["1"] - 4)', "column 5: float division by zero"),
    ],
)
def test_arithmetic_that_gives_no_finite_number_fails(check, message):
    assert refusal(check) == message


ATTACKS = [
    "__import__('os').system('true') == 0",
    "open('/etc/passwd') == 1",
    "exec('1') == 1",
    "eval('1') == 1",
    "data.__class__ == 1",
    "data['train/loss'].__class__.__mro__ == 1",
    "min.__globals__ == 1",
    "().__class__.__bases__[0].__subclasses__() == 1",
    "(lambda: 1)() == 1",
    "[x for x in data][0] == 1",
    "min(x for x in data) == 1",
    "{1: 2}[1] == 2",
    "(x := 1) == 1",
    "f'{data}' == 1",
    "9 ** 9 ** 9 > 1",
    "1 << 10 > 1",
    "'a' * 10 == 1",
    "'a' < 'b'",
    "1j == 1",
    "True == 1",
    "None == 0",
    "... == 1",
    "(1 if 1 else 2) == 1",
    "not 1 > 2",
    "1 > 2 or 2 > 1",
    "(1 < 2) == 1",
    "(1 > 2 and 2 > 1) == 0",
    "1 < 2 and (2 < 3 and 3 < 4)",
    "1 in data",
    "1 is 1",
    "~1 == -2",
    "+1 == 1",
    "min(1, 2) == 1",
    "min(data) == 1",
    "min() == 1",
    "min(*data) == 1",
    "min(**data) == 1",
    'min(data["a"], key=1) == 1',
    'min(data["a"], 1, range_start=1) == 1',
    'min(data["a"], 1, 2, 3) == 1',
    'min(data["a"], 1.5) == 1',
    'min(data["a"], True) == 1',
    'min(data["a"], 1 + 1) == 1',
    'ratio_above(data["a"]) == 1',
    'ratio_above(data["a"], "b") == 1',
    'min(min)(data["a"]) == 1',
    'sum(data["a"]) == 1',
    'data["a"] == 1',
    'data["a"][1] == 1',
    'data["a"][-1] == 1',
    'data["a"]["1":"2"] == 1',
    'data["a"]["last"] == 1',
    'data["a"]["٣"] == 1',
    'data["a"]["1"]["2"] == 1',
    "data[0] == 1",
    'metrics["a"]["1"] == 1',
    'data["a" + "b"]["1"] == 1',
    "1e999 > 1",
    'mean(data["a"])',
    "1",
    "",
    "1 >",
    "1 > 2; 2 > 1",
    "1 > 2\n3 > 2",
    "\0 > 1",
    "x = 1",
    "import os",
    "1 == 1" + " " * LONGEST_CHECK,
]


@pytest.mark.parametrize("check", ATTACKS)
def test_nothing_but_the_grammar_is_parsed(check):
    with pytest.raises(CheckError):
        parse_check(check)


@pytest.mark.parametrize("left", ["-" * (LONGEST_CHECK - 6) + "1", "(" * 140 + "1" + ")" * 140])
def test_expressions_as_deep_as_their_length_allows_are_evaluated(left):
    assert holds(f"{left} == 1")


# The command


@pytest.fixture
def checked(tmp_path, capsys):
    """Write the text as METRICS_JSON, run the command, and give its status and its lines."""

    def call(text, *checks, steps=STEPS):
        path = tmp_path / "metrics.json"
        path.write_text(text if isinstance(text, str) else json.dumps(text), "utf-8")
        status = main([str(path), "--steps", str(steps), *checks])
        return status, capsys.readouterr().out.splitlines()

    return call


def test_the_command_says_how_each_check_stands(checked):
    status, lines = checked(
        METRICS, '2 < mean(data["train/loss"]) < 3', 'data["train/loss"]["4"] < 1', "1 < open"
    )
    assert status == 1
    assert lines == [
        'FAIL    2 < mean(data["train/loss"]) < 3: 2, 2, 3',
        'pass    data["train/loss"]["4"] < 1: 0.5, 1',
        'FAIL    1 < open: Name at column 5 is not a number, data["name"]["step"] or a helper',
    ]


def test_the_command_succeeds_when_all_pass(checked):
    status, lines = checked(METRICS, 'data["train/loss"]["4"] < 1')
    assert (status, len(lines)) == (0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"x": {"1": 1, "1": 2}}', "'1' is there twice"),
        ('{"x": {"1": 1}, "x": {"1": 1}}', "'x' is there twice"),
        ('{"x": {"1": NaN}}', "x at step 1 is nan"),
        ('{"x": {"1": 1e999}}', "x at step 1 is inf"),
        ("[]", "does not hold an object"),
        ("{", "metrics.json: Expecting"),
    ],
)
def test_files_that_are_no_metrics_fail(checked, text, message):
    status, lines = checked(text, 'max(data["x"]) > 0', steps=1)
    assert status == 1
    assert message in lines[0]


def test_a_missing_file_fails(tmp_path):
    with pytest.raises(CheckError, match="No such file"):
        read_metrics(tmp_path / "metrics.json", 1)


def test_parse_only_reads_no_metrics(capsys):
    assert main(["missing.json", "--steps", "1", "--parse-only", 'max(data["x"]) > 0']) == 0
    assert main(["missing.json", "--steps", "1", "--parse-only", 'max(data["x"])']) == 1
    assert capsys.readouterr().out.splitlines()[0].startswith("parsed")
