import pytest

from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.environment.games import ArithmeticEnvironment, character_score


@pytest.mark.parametrize(
    ("response", "finished", "score"),
    [
        ("527", True, 1.0),
        ("527", False, 0.75),  # never ended
        ("5271", True, 0.75),  # one character too many: the end is in the wrong place
        ("52", True, 0.5),  # ended early
        ("572", True, 0.5),
        ("275", True, 0.25),  # all digits there, none in place
        ("x527", False, 0.0),  # shifted by one
        ("", True, 0.0),
        ("", False, 0.0),
    ],
)
def test_score_counts_correct_positions_and_the_end(response: str, finished: bool, score: float) -> None:
    assert character_score("527", response, finished) == score


def test_scores_keep_the_order_of_the_responses() -> None:
    prompts = [Prompt(12, "12>", "12"), Prompt(34, "34>", "34"), Prompt(56, "56>", "56")]
    scores = ArithmeticEnvironment().score(prompts, ["12", "99", "56"], [True, False, False])
    assert scores == pytest.approx([1.0, 0.0, 2 / 3])


def test_a_missing_response_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ArithmeticEnvironment().score([Prompt(1, "1>", "1"), Prompt(2, "2>", "2")], ["1"], [True])
