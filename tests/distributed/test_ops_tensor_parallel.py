"""The kernels of log-probabilities, for given ids and of the top k, on 1, 2 and 4 ranks against one rank in float64."""

import math

import ops_cases
import pytest
from ops_cases import HIDDEN, TOKENS

TOLERANCE = {"float64": (1e-12, 1e-11), "float32": (1e-5, 4e-6), "bfloat16": (0.1, 0.05)}


@pytest.fixture(scope="module")
def reports(ranks):
    """What each of four ranks found of every case."""
    return ranks(ops_cases.RANKS).run(ops_cases.report)


@pytest.mark.parametrize("case", [*ops_cases.cases()], ids=lambda case: case.name)
def test_matches_a_single_rank(reports, case):
    outputs, grads = TOLERANCE[case.dtype]
    for errors, _ in reports:
        found = errors[case.name]
        assert ("entropy" in found) == case.with_entropy
        assert ("tail_logmass" in found) == (case.path in ops_cases.GIVEN_IDS)
        assert ("hidden_grad" in found) == (case.path != "topk")
        assert ("weight_grad" in found) == (case.path not in ("topk", "frozen"))
        for name, error in found.items():
            assert not math.isnan(error), (name, found)
            if name in ("masked", "indices") or name.endswith("differs"):
                assert error == 0, (name, found)
            else:
                assert error <= (grads if "grad" in name else outputs), (name, found)


@pytest.mark.parametrize(
    ("path", "entropy", "numbers"),
    [("fused", "plain", 2), ("fused", "entropy", 3), ("at", "plain", 7), ("topk", "plain", 12)],
)
def test_one_collective_forward_and_the_gradient_backward(reports, path, entropy, numbers):
    """Statistics of a token; of given ids their logits as well, of the top k also those ids."""
    sent = reports[0][1]
    hidden = ("all_gather_single", TOKENS // 2 * HIDDEN)
    of_gradient = {
        "replicated": ("all_reduce", TOKENS * HIDDEN),
        "sp": ("reduce_scatter_single", TOKENS * HIDDEN),
    }
    outputs, backward = ("all_gather_single", numbers * TOKENS), path != "topk"
    assert sent[f"{path}-replicated-{entropy}"] == [outputs, of_gradient["replicated"]][: 1 + backward]
    expected = [hidden, outputs, hidden, of_gradient["sp"]][: 2 + 2 * backward]
    assert sent[f"{path}-sp-{entropy}"] == expected
