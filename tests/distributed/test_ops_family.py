"""The top-k functions of teacher and student on 1, 2 and 4 gloo ranks against the single-rank float64 oracle."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import forked_ranks
import ops_family_cases
from ops_family_cases import HIDDEN, TOKENS

TOLERANCE = {"float64": (1e-12, 1e-11), "float32": (1e-5, 4e-6), "bfloat16": (0.1, 0.05)}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    """One launch of four ranks computes every case."""
    destination = tmp_path_factory.mktemp("ops") / "report.json"
    return forked_ranks.run_script(ops_family_cases.__file__, destination)


@pytest.mark.parametrize("case", ops_family_cases.cases(), ids=lambda case: case.name)
def test_matches_a_single_rank(reports, case):
    outputs, grads = TOLERANCE[case.dtype]
    for report in reports:
        errors = report["errors"][case.name]
        assert set(ops_family_cases.OUTPUTS) < errors.keys()
        assert {"hidden_grad", "weight_grad"} <= errors.keys() or case.function == "topk"
        for name, error in errors.items():
            assert not math.isnan(error), (name, errors)
            if name in ("masked", "indices") or name.endswith("differs"):
                assert error == 0, (name, errors)
            else:
                assert error <= (grads if "grad" in name else outputs), (name, errors)


@pytest.mark.parametrize(("entropy", "floats"), [("plain", 2), ("entropy", 3)])
def test_one_collective_forward_and_the_gradient_backward(reports, entropy, floats):
    k, sent = 5, reports[0]["collectives"]
    hidden = ["all_gather_single", TOKENS // 2 * HIDDEN]
    logits = ["all_gather_single", (floats + k) * TOKENS]
    assert sent[f"at-replicated-{entropy}"] == [logits, ["all_reduce", TOKENS * HIDDEN]]
    scatter = ["reduce_scatter_single", TOKENS * HIDDEN]
    assert sent[f"at-sp-{entropy}"] == [hidden, logits, hidden, scatter]
    logits_and_ids = ["all_gather_single", (floats + 2 * k) * TOKENS]
    assert sent[f"topk-replicated-{entropy}"] == [logits_and_ids]
    assert sent[f"topk-sp-{entropy}"] == [hidden, logits_and_ids]
