import math

import pytest
import torch

from nemo_rl_mcore.config import ClippedPGLossConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses.base import Masks, MetricKind
from nemo_rl_mcore.losses.clipped_pg import importance_weights

RATIOS = [[2.0, 1.0, 0.25], [1.1, 0.9, 5.0], [8.0, 8.0, 8.0]]
MASKS = Masks.of(
    BatchedDataDict(
        token_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]),
        sample_mask=torch.tensor([1, 1, 0]),
    ),
    torch.float64,
)


@pytest.mark.parametrize(
    ("low", "high", "tis", "icepop"),
    [
        (1.0, 9.0, [[2, 1, 1], [1.1, 1]], [[2, 1, 0], [1.1, 0]]),
        (0.0, 1.0, [[1, 1, 0.25], [1, 0.9]], [[0, 1, 0.25], [0, 0.9]]),
    ],
)
def test_bounds_are_inclusive(low: float, high: float, tis: list[list[float]], icepop: list[list[float]]):
    # exp(log x) may round; 0 and its weight of 1 do not.
    log_ratio = MASKS.keep(torch.tensor(RATIOS, dtype=torch.float64).log(), "ratios")
    for kind, expected in (("tis", tis), ("icepop", icepop)):
        cfg = ClippedPGLossConfig(
            use_importance_sampling_correction=True,
            truncated_importance_sampling_type=kind,
            truncated_importance_sampling_ratio=high,
            truncated_importance_sampling_ratio_min=low,
        )
        found = importance_weights(cfg, log_ratio, MASKS)
        shown = [found.weights[b, t].item() for b, t in MASKS.valid.nonzero().tolist()]
        assert shown == pytest.approx([w for row in expected for w in row], rel=1e-7)
        assert found.weights[0, 1].item() == 1
        assert found.out_of_bounds is not None
        assert (found.out_of_bounds.value.item(), found.out_of_bounds.kind) == (2, MetricKind.TOKENS)


def test_a_weight_that_is_not_finite_is_zero_before_the_bounds():
    masks = Masks.of(BatchedDataDict(token_mask=torch.ones(1, 4), sample_mask=torch.ones(1)), torch.float64)
    log_ratio = torch.tensor([[math.inf, math.nan, 0.0]], dtype=torch.float64)
    # The geometric mean leaves those two out, so the row stays.
    for kind, expected in (("tis", [0.5, 0.5, 1]), ("icepop", [0, 0, 1]), ("seq-mask-tis", [0, 0, 1])):
        cfg = ClippedPGLossConfig(
            use_importance_sampling_correction=True,
            truncated_importance_sampling_type=kind,
            truncated_importance_sampling_ratio=2.0,
            truncated_importance_sampling_ratio_min=0.5,
        )
        assert importance_weights(cfg, log_ratio, masks).weights.tolist() == [expected], kind
