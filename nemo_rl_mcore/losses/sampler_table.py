"""Measure how far the weights that train are from those that sampled: a table with a row for each row of a batch.

The driver computes it where a pass before training gives prev_logprobs; else the loss does, of the training pass's own
log-probabilities. Whatever is reported or done about the difference reads this table: see `driver.algorithms.mismatch`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from nemo_rl_mcore.config.loss import KLType
from nemo_rl_mcore.losses.kl import kl_estimate, log_ratio_estimate

ROW_NUMBER = "row_number"
"""Column int64 [B]: which row of the table a row of the batch is, wherever a rank or a microbatch has it."""
COLUMNS = ("tokens", "error", "divergence", "ratio", "ratio_squares", "behaviour_kl", "ratio_max")
"""Sums over the trained tokens of a row, and a maximum.

tokens: how many. error: exp|generation - training|. divergence: of training from generation, by the loss's estimator.
ratio: of the probability in training to that in generation. behaviour_kl: the k3 estimate of their divergence.
"""


def sampler_table(generation: Tensor, training: Tensor, counted: Tensor, kl_type: KLType) -> Tensor:
    """Return fp64 [B, len(COLUMNS)] from log-probabilities [B, S].

    counted: bool [B, S]. What stands elsewhere is not read: infinity times zero would not be zero.
    """
    generated, computed = generation.double(), training.double()
    log_ratio = computed - generated
    ratio = log_ratio.exp()
    summed = (
        torch.ones_like(ratio),
        log_ratio.abs().exp(),
        kl_estimate(generated, computed, kl_type),
        ratio,
        ratio.square(),
        log_ratio_estimate(log_ratio, "k3"),
    )
    largest = pad(torch.where(counted, ratio, 0.0), (1, 0)).amax(1)  # 0 of a row without columns
    return torch.stack([*(torch.where(counted, values, 0.0).sum(1) for values in summed), largest], dim=1)
