"""Which responses give the same answer."""

import pytest

from nemo_rl_mcore.environment.games import ArithmeticEnvironment
from nemo_rl_mcore.environment.interface import Vote, votes_of


def test_without_a_reader_of_answers_equal_texts_are_equal():
    found = votes_of(ArithmeticEnvironment(), ["12", "1", "12", "", ""])
    assert found == [Vote("12", 0), Vote("1", 1), Vote("12", 0), Vote("", 3), Vote("", 3)]


@pytest.mark.needs("math")
def test_mathematical_answers_are_equal_as_expressions():
    from nemo_rl_mcore.environment.mathematics import MathEnvironment

    said = [
        r"so \boxed{1/2}", "the answer is $0.5$", r"\boxed{\frac{2}{4}}", "12 apples", "",
        r"\boxed{\text{Monday}}", "the answer is Monday", "12",
    ]  # fmt: skip
    found = votes_of(MathEnvironment(5), said)
    assert [vote.first for vote in found] == [0, 0, 0, 3, None, 5, 5, 3]
    assert [vote.answer for vote in found][3:6] == ["12", None, "monday"]
