"""The split step equals `train` on every layout; `parity.py` holds the cases, and runs all of them by hand."""

import parity
import pytest
from tolerances import SPLIT_STEP


@pytest.mark.smoke
def test_the_selection_holds_every_pair():
    chosen = parity.pairwise()
    assert len(chosen) < 30
    for first, second in ((a, b) for a in parity.FACTORS for b in parity.FACTORS if a < b):
        pairs = {(case[first], case[second]) for case in chosen}
        assert len(pairs) == len(parity.FACTORS[first]) * len(parity.FACTORS[second])


@pytest.mark.smoke("pp2-vpp2, token level, tied, no fused, distributed_optimizer, no overlap_grad_reduce")
@pytest.mark.quick_cases(
    "dp2, gspo, tied, fused, distributed_optimizer, overlap_grad_reduce",
    "tp2-sp, nll, tied, fused, no distributed_optimizer, no overlap_grad_reduce",
    "pp2-vpp2, token level, tied, no fused, distributed_optimizer, no overlap_grad_reduce",
)
@pytest.mark.exhaustive_cases(
    "dp2, token level, no tied, no fused, no distributed_optimizer, no overlap_grad_reduce",
    "tp2, nll, no tied, no fused, distributed_optimizer, overlap_grad_reduce",
    "pp2, token level, no tied, fused, no distributed_optimizer, overlap_grad_reduce",
    "pp2, gspo, tied, no fused, distributed_optimizer, no overlap_grad_reduce",
    "pp2-vpp2, gspo, no tied, fused, no distributed_optimizer, overlap_grad_reduce",
    "tp2-pp2, gspo, tied, fused, distributed_optimizer, overlap_grad_reduce",
    "ep2, token level, no tied, no fused, no distributed_optimizer, no overlap_grad_reduce",
    "ep2, gspo, tied, fused, distributed_optimizer, overlap_grad_reduce",
)
@pytest.mark.parametrize("case", parity.pairwise(), ids=parity.name_of)
def test_split_step_equals_train(ranks, case):
    for rank in ranks(parity.LAYOUTS[case["layout"]][0]).run(parity.differences, case):
        assert rank["updated"]
        assert rank["moved"] > 1e-3
        if case["layout"] == "ep2":
            assert all(value > 0 for step in rank["balance"] for value in step.values())
            assert all(rank["balance"])
        for rows in parity.SPLITS:
            assert rank[f"split {rows}"] <= SPLIT_STEP, rows
            assert rank[f"norm {rows}"] <= SPLIT_STEP, rows
            assert not any(rank[f"keys {rows}"])
