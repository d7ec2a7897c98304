import pytest

from nemo_rl_mcore.config.environment import AnswerConfig, last_boxed, stated_answer
from nemo_rl_mcore.environment.mathematics import as_quantity, as_words, is_sentence

SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nIn all she sold <<48+24=72>>72 clips.\n#### 72"


@pytest.mark.parametrize(
    ("how", "text", "answer"),
    [
        ({"after": "####"}, SOLUTION, "72"),
        ({"after": "####"}, "#### 1\n#### 1,234\n\nQuestion: and 5?", "1,234"),
        ({"after": "####"}, "####\n  72 ", "72"),
        ({"after": "####"}, "72", None),
        ({"after": "####"}, "so #### ", None),
        ({"after": "A:"}, "Q: 1+1 A: 2", "2"),
        ({"regex": r"(-?[\d,]+) clips"}, SOLUTION, "72"),
        ({"regex": r"answer is (\d+)"}, SOLUTION, None),
        ({"regex": r"#### (\d+)?"}, "#### none", None),
        ({"regex": r"x=((?:-|\+)?\d)"}, "x=1, then x=-2", "-2"),
        ({"boxed": True}, r"so $\boxed{1}$, no: $x=\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        ({"boxed": True}, SOLUTION, None),
        ({"boxed": True}, r"\boxed{}", None),
    ],
)
def test_where_an_answer_stands(how, text, answer):
    assert AnswerConfig.model_validate(how).extract(text) == answer


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {5}", "5"),
        (r"$\fbox{5}$", "5"),
        (r"\framebox{5}", "5"),
        (r"\framebox [2cm] [l] {5}", "5"),
        (r"$\boxed 5$.", "5"),
        (r"\boxed{1 + \boxed{2}}", "2"),
        (r"\boxed{4} and \boxed{5", None),
        (r"\boxed", None),
        ("no box", None),
    ],
)
def test_the_last_box(text, held):
    assert last_boxed(text) == held


def test_a_long_unclosed_text_is_read_in_one_pass():
    assert last_boxed("\\boxed{" * 20_000 + "{" * 20_000) is None


@pytest.mark.parametrize(
    ("response", "stated"),
    [("The answer is A\n#### B\n", "B"), ("Is the answer: A?\nThe answer is: B", "B"), ("yes", "yes")],
)
def test_where_a_response_most_likely_states_its_answer(response, stated):
    assert stated_answer(response) == stated


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("A", "a"),
        ("(A)", "a"),
        (r"\text{(A)}", "a"),
        ("Yes.", "yes"),
        (r"$\text{New York}$", "newyork"),
        ("**no**", "no"),
        ("日曜日", "日曜日"),
        *((text, None) for text in ("x+y", r"\pi", "5 apples", "½", "")),
    ],
)
def test_words(answer, words):
    assert as_words(answer) == words


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("72", "72"),
        ("72.", "72"),
        ("-1,234.50", "-1234.50"),
        ("\u22127", "-7"),
        ("$72$", "72"),
        (r"\$18", "18"),
        ("-$5", "-5"),
        (".5", "0.5"),
        ("72 clips", "72"),
        (r"72 \text{ square feet}", "72"),
        ("50%", "50%"),
        (r"12.5\%", "12.5%"),
        ("50 percent", "50%"),
        ("1.5e3", "1500"),
        ("1e-05", "0.00001"),
        *((text, None) for text in ("7 million", "3 Dozens", "2 ab", "2 sin x", "5 feet 3 inches")),
        *((text, None) for text in ("about 72", "12,34", "1/2", "1e9999")),
    ],
)
def test_quantities(answer, number):
    assert as_quantity(answer) == number


@pytest.mark.parametrize(
    ("answer", "is_one"),
    [
        *(
            (text, False)
            for text in ("72", "72 clips", "hello world", "x^2+1", "sin x + cos x + 2", "about 72")
        ),
        (r"x=5 \text{ or else } x=6", False),
        (r"We have 3 boxes of 4 clips each, so $\boxed{12}$.", False),
        (SOLUTION, True),
        ("Therefore the sum is x = 15", True),
    ],
)
def test_sentences(answer, is_one):
    assert is_sentence(answer) == is_one
