import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_holds, brief, briefs

from nemo_rl_mcore.config import ConfigError, EnvConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.environment.mathematics import MathEnvironment
from nemo_rl_mcore.environment.registry import make_environment
from nemo_rl_mcore.errors import RunStoppedError

pytestmark = pytest.mark.needs("math")

SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nIn all she sold <<48+24=72>>72 clips.\n#### 72"
MARKER = {"after": "####"}


def make(**section):
    environment = make_environment(EnvConfig.model_validate({"math": section}))
    assert isinstance(environment, MathEnvironment)
    return environment


def score(answer, response, /, **section):
    return make(**section).score([Prompt(0, "?", answer)], [response], [True])[0]


@pytest.mark.parametrize(
    ("answer", "response", "wanted"),
    [
        ("1/2", "so the answer is 0.5", 1),
        (r"\frac{1}{2}", r"thus $\boxed{\frac{2}{4}}$.", 1),
        ("42", r"first 41, but in the end \boxed{42}", 1),
        ("42", r"\boxed{41}, near to 42", 0),
        ("x+1", "$1+x$", 1),
        ("1,000", "1000", 1),
        ("42", "", 0),
        ("42", "no number", 0),
    ],
)
def test_expressions_are_compared_by_value(answer, response, wanted):
    assert score(answer, response) == wanted


def test_scores_stand_in_the_order_of_the_responses():
    prompts = [Prompt(7, "1>", "1"), Prompt(8, "2>", "2")]
    assert make().score(prompts * 2, ["1", "1", "2", "2"], [True] * 4) == [1, 0, 0, 1]


@pytest.mark.parametrize(
    "response", ["The answer is 72", "The answer is 72 clips.", r"\boxed{72}", "#### 72", "72"]
)
def test_published_solutions_hold_their_answer_behind_a_marker(response):
    assert score(SOLUTION, response, gold=MARKER) == 1
    assert score(SOLUTION, response.replace("72", "24"), gold=MARKER) == 0


def test_published_solutions_hold_their_answer_in_a_box():
    solution = r"Since $2 \cdot 3 = 6$, there are $\boxed{\frac{1}{6}}$ or $\boxed{\frac{1}{3}}$ of 2 kinds."
    assert score(solution, r"$\frac{2}{6}$", gold={"boxed": True}) == 1
    assert score(solution, r"$\frac{1}{6}$", gold={"boxed": True}) == 0


@pytest.mark.parametrize(
    ("response", "section", "wanted"),
    [
        ("The answer: 3 boxes.\n#### 72", MARKER, 1),
        ("#### 72 clips", MARKER, 1),
        ("#### $72.00$\n#", MARKER, 1),
        ("#### 24\n#### 72", MARKER, 1),
        (r"\boxed{72}", MARKER, 0),
        ("The answer is 72", MARKER, 0),
        (r"24 or \boxed{72}", {"boxed": True}, 1),
        ("72", {"boxed": True}, 0),
        ("it is <72>, not <a>", {"regex": r"<(\d+)>"}, 1),
        ("it is 72", {"regex": r"<(\d+)>"}, 0),
    ],
)
def test_where_a_response_must_state_its_answer(response, section, wanted):
    assert score(SOLUTION, response, gold=MARKER, response=section) == wanted


BOXES = [
    ("42", r"\fbox{42}", 1),
    ("42", r"\framebox{42}", 1),
    ("42", r"\framebox[3cm][c]{$42$}", 1),
    ("42", r"\boxed {42}", 1),
    ("42", r"\boxed{42.}", 1),
    ("42", r"\boxed{7} then \boxed{42}", 1),
    ("7", r"\boxed{7} then \boxed{42}", 0),
    ("2", r"$\boxed{1}$ and $\boxed{2}$", 1),
    ("{1, 2}", r"$\boxed{1}$ and $\boxed{2}$", 0),
    ("{1, 2}", r"\boxed{1, 2}", 1),
    ("1234", r"\boxed{1\,234}", 1),
    ("235", r"\boxed{1\,234}", 0),
    (r"1\,234", r"\boxed{1234}", 1),
    ("1,234,567", r"\boxed{1\,234\;567}", 1),
    ("1234.5", r"\boxed{1~234.5 \text{ cm}}", 1),
    ("1234", r"\boxed{1{,}234 \text{ clips}}", 1),
    ("1234", r"\boxed{1,\!234}", 1),
    ("42", r"The answer is 42: \boxed{}", 0),
]


@pytest.mark.parametrize(("answer", "response", "wanted"), BOXES)
def test_a_box_is_read_alike_with_and_without_a_setting(answer, response, wanted):
    assert score(answer, response) == score(answer, response, response={"boxed": True}) == wanted


@pytest.mark.parametrize("response", [r"so $1\,234$", "The answer is $1\\,234$.", r"#### 1\,234"])
def test_groups_of_digits_are_one_number_outside_of_boxes(response):
    assert [score("1234", response), score("235", response)] == [1, 0]


# Each answer in the four ways that responses state theirs: in a box, said, behind a marker, as a formula.
WAYS = (r"So it is \boxed{%s}", "3 of 4 are left.\nThe answer is %s.", "All 3 count.\n#### %s", "it is $%s$.")


@pytest.mark.parametrize(
    "answer", ["72", "1,234", "A", "(B)", "yes", "Paris", r"\text{Monday}", "50%", "-3", "3/4"]
)
def test_an_answer_equals_itself_however_it_is_stated(answer):
    make().require_answers([Prompt(0, "?", answer)])
    assert [score(answer, way % answer) for way in WAYS] == [1] * 4


@pytest.mark.parametrize("answer", ["72 clips", "18 dollars", "72 square feet"])
def test_a_unit_is_not_compared(answer):
    make().require_answers([Prompt(0, "?", answer)])
    number = answer.partition(" ")[0]
    assert [score(answer, way % answer) for way in WAYS[:3]] == [1] * 3
    assert [score(answer, way % number) for way in WAYS] == [1] * 4
    assert [score(number, way % answer) for way in WAYS[:3]] == [1] * 3
    assert [score(answer, way % "71 clips") for way in WAYS[:3]] == [0] * 3


@pytest.mark.parametrize(
    ("answer", "response", "wanted"),
    [
        ("50%", r"\boxed{50\%}", 1),
        ("50", r"\boxed{50\%}", 1),
        ("50%", r"\boxed{0.5}", 1),
        ("50%", r"\boxed{51\%}", 0),
        ("1.5e3", r"\boxed{1500}", 1),
        ("1500", r"\boxed{1.5e3}", 1),
        ("A", r"\boxed{\textbf{(A)}}", 1),
        ("A", "The answer is B.", 0),
        ("A", "A or B, so the answer is B", 0),
        ("Yes", r"\boxed{\text{yes}}", 1),
        ("no", r"\boxed{on}", 0),
        ("East", r"\boxed{seat}", 0),
        ("ab", r"\boxed{b \cdot a}", 1),
        (r"\infty", r"\boxed{infinity}", 1),
        ("x", "$x$\nThis is the answer", 1),
    ],
)
def test_words_percents_and_powers(answer, response, wanted):
    assert score(answer, response) == wanted


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        *((text, "env.math.gold: wrong-row") for text in ("#", "..", "{", "}", "%", "½")),
        ("1/0", "env.math.gold: wrong-row"),
        ("", "env.math.gold: wrong-row"),
        ("env.math.gold: wrong-row", "env.math.gold: wrong-row"),
    ],
)
def test_answers_that_nothing_can_equal_are_refused(answer, why):
    rows = [Prompt(0, "?", "1"), Prompt(1, "?", answer, place="rows.jsonl:2"), Prompt(2, "?", answer)]
    with pytest.raises(ConfigError) as caught:
        make().require_answers(rows)
    told = briefs(caught.value.problems)
    assert told[0].startswith("env.math.gold: wrong-row")
    assert told[1].startswith("env.math.gold: wrong-row")


def test_of_many_answers_the_first_are_told():
    with pytest.raises(ConfigError) as caught:
        make(gold=MARKER).require_answers([Prompt(number, "?", "72") for number in range(40)])
    assert len(caught.value.problems) == 6
    assert brief(caught.value.problems[-1]) == "env.math.gold: wrong-row"
    assert_holds(str(caught.value.problems[-1]), 35)


def test_an_answer_that_comes_later_stops_the_run_by_name():
    why = r"env\.math\.gold: prompt 3: the answer '72' has no answer after '####'"
    environment = make(gold=MARKER)
    with pytest.raises(RunStoppedError, match=why):
        environment.score([Prompt(3, "?", "72")], ["72"], [True])


@settings(deadline=None, max_examples=40)  # the first expression takes long: tables are made
@given(st.from_regex(r"-?[0-9]{1,30}(\.[0-9]{1,10})?", fullmatch=True))
def test_numbers_that_are_taken_on_trust_equal_themselves(text):
    assert make().wrong_answers([Prompt(0, "?", text)]) == {}
    assert score(text, rf"\boxed{{{text}}}") == 1


def test_an_answer_that_takes_too_long_is_quoted_in_short(caplog):
    assert score("1", r"\boxed{1}") == 1  # which loads the library
    # Its own alarm would end whatever Python is doing then, the collection of garbage too.
    logging.getLogger("math_verify.parser").error("Timeout during parsing: %s", "1+" * 20_000)
    assert [len(record.getMessage()) for record in caplog.records] == [500]
