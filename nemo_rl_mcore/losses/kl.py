"""Schulman's estimators of the KL divergence of the policy from its reference, per token.

http://joschu.net/blog/kl-approx.html. The loss and the advantage estimators share this code.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from nemo_rl_mcore.config.loss import KLType


def log_ratio_estimate(log_ratio: Tensor, kl_type: KLType) -> Tensor:
    """Return the KL estimate of a log-ratio q = log r - log c: k1 = -q, k2 = q^2/2, k3 = exp(q) - 1 - q."""
    match kl_type:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return torch.exp(log_ratio) - 1 - log_ratio


def kl_estimate(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    kl_type: KLType,
    *,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Return the KL estimate per token, in the shape of `logprobs`.

    The log-ratio is clamped to +-input_clamp, the estimate (times `weight`) to +-output_clamp. `weight` carries the
    gradient through the sampling probability (https://arxiv.org/abs/2506.09477), except where the input clamp acts.
    """
    log_ratio = reference_logprobs - logprobs
    if input_clamp is not None:
        clamped = log_ratio.clamp(-input_clamp, input_clamp)
        if weight is not None:
            weight = torch.where(clamped == log_ratio, weight, weight.detach())
        log_ratio = clamped
    estimate = log_ratio_estimate(log_ratio, kl_type)
    if weight is not None:
        estimate = weight * estimate
    if output_clamp is None:
        return estimate
    # A clamped value is detached: the clamp's zero gradient times an overflow's infinite one would be NaN.
    estimate = estimate.detach()
    inside = estimate.abs() <= output_clamp
    differentiated = log_ratio_estimate(torch.where(inside, log_ratio, 0.0), kl_type)
    if weight is not None:
        differentiated = weight * differentiated
    return torch.where(inside, differentiated, estimate.clamp(-output_clamp, output_clamp))


def finite_exp(exponent: Tensor) -> Tensor:
    """Return exp(exponent), and zero with a zero gradient where that is NaN or infinite."""
    finite = torch.isfinite(torch.exp(exponent.detach()))
    return torch.where(finite, torch.exp(torch.where(finite, exponent, 0.0)), 0.0)


ROW_NUMBER = "row_number"
"""Column int64 [B]: the row's index in the table, independent of its rank and microbatch."""
COLUMNS = ("tokens", "error", "divergence", "ratio", "ratio_squares", "behaviour_kl", "ratio_max")
"""Sums over the trained tokens of a row, and a maximum.

tokens: count. error: exp|generation - training|. divergence: training's from generation, by the loss's estimator.
ratio: the probability in training over that in generation. behaviour_kl: the k3 estimate of their divergence.
"""


def sampler_table(generation: Tensor, training: Tensor, counted: Tensor, kl_type: KLType) -> Tensor:
    """Return fp64 [B, len(COLUMNS)] from log-probabilities [B, S]; positions outside of `counted` are not read.

    A token outside training's filters (-inf) counts as agreement, as it does in the loss.
    """
    generated = generation.double()
    computed = torch.where(training == -torch.inf, generated, training.double())
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
