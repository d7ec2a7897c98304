"""The log-probability kernels on 1, 2 and 4 gloo ranks against the single-rank float64 oracle."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import ops_cases

TOLERANCE = {"float64": (1e-12, 1e-11), "float32": (1e-5, 4e-6), "bfloat16": (0.1, 0.05)}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    """One launch of four ranks computes every case."""
    path = tmp_path_factory.mktemp("ops") / "report.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, ops_cases.__file__, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(path.read_text())


@pytest.mark.parametrize("case", ops_cases.cases(), ids=lambda case: case.name)
def test_matches_a_single_rank(report, case):
    errors = report["errors"][case.name]
    outputs, grads = TOLERANCE[case.dtype]
    assert {"logprobs", "hidden_grad"} <= errors.keys()
    assert ("weight_grad" in errors) == (case.path != "frozen")
    assert ("entropy" in errors) == case.with_entropy
    for name, error in errors.items():
        assert not math.isnan(error), name
        assert error <= (grads if "grad" in name else outputs), (name, errors)
    assert errors["replicas_differ"] == errors["masked"] == 0


TOKENS, HIDDEN = ops_cases.TOKENS, ops_cases.HIDDEN


@pytest.mark.parametrize(("entropy", "floats"), [("plain", 2), ("entropy", 3)])
def test_one_collective_forward_and_the_gradient_backward(report, entropy, floats):
    statistics = ["all_gather_single", floats * TOKENS]
    hidden = ["all_gather_single", TOKENS // 2 * HIDDEN]
    sent = report["collectives"]
    assert sent[f"replicated-{entropy}"] == [statistics, ["all_reduce", TOKENS * HIDDEN]]
    scatter = ["reduce_scatter_single", TOKENS * HIDDEN]
    assert sent[f"sp-{entropy}"] == [hidden, statistics, hidden, scatter]
