"""Windows, sinks, and experts with biases and clamped gates are transformers' in float64, on every layout."""

import family_cases as cases
import pytest

ADAM = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.0}
"""With a smaller eps a step would multiply the rounding of small gradients."""
NAMES = ("gpt-oss", "gpt-oss-tied")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(name)`: see `family_cases.saved_models`."""
    return cases.saved_models(tmp_path_factory, **ADAM)


@pytest.mark.smoke("gpt-oss-one-packed")
@pytest.mark.quick_cases("gpt-oss-one-padded", "gpt-oss-tp2-sp-ep2-packed", "gpt-oss-tied-pp2-padded")
@pytest.mark.exhaustive_cases("gpt-oss-one-recomputed-packed", "gpt-oss-tied-cp2-packed")
@pytest.mark.parametrize("rows", cases.ROWS)
@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name in NAMES for layout in cases.OF_EXPERTS]
)
def test_log_probabilities_and_gradients(ranks, saved, name, layout, rows):
    cases.assert_a_pass_is_theirs(ranks, saved(name), layout, rows)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("gpt-oss", "one"), ("gpt-oss-tied", "tp2-sp"), ("gpt-oss", "pp2"), ("gpt-oss-tied", "tp2-sp-ep2")],
)
def test_steps_of_adamw(ranks, saved, name, layout):
    cases.assert_steps_are_theirs(ranks, saved(name), layout, ADAM)
