"""Schulman's estimators of the KL divergence of the policy from its reference, per token.

http://joschu.net/blog/kl-approx.html. Loss and advantage estimators share this one copy.
"""

import torch
from torch import Tensor

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

    The log-ratio is clamped to +-input_clamp, the estimate (times `weight`) to +-output_clamp. `weight`
    carries the gradient through the sampling probability (https://arxiv.org/abs/2506.09477); where the input
    clamp acts it is detached, so that the clamp stops both gradients.
    """
    log_ratio = reference_logprobs - logprobs
    if input_clamp is not None:
        clamped = log_ratio.clamp(-input_clamp, input_clamp)
        if weight is not None:
            weight = torch.where(clamped == log_ratio, weight, weight.detach())
        log_ratio = clamped
    estimate = _weighted_estimate(log_ratio, kl_type, weight)
    if output_clamp is None:
        return estimate
    # What is clamped is a constant: the clamp's zero gradient times that of an overflow would be no number.
    estimate = estimate.detach()
    inside = estimate.abs() <= output_clamp
    differentiated = _weighted_estimate(torch.where(inside, log_ratio, 0.0), kl_type, weight)
    return torch.where(inside, differentiated, estimate.clamp(-output_clamp, output_clamp))


def _weighted_estimate(log_ratio: Tensor, kl_type: KLType, weight: Tensor | None) -> Tensor:
    estimate = log_ratio_estimate(log_ratio, kl_type)
    return estimate if weight is None else weight * estimate


def finite_exp(exponent: Tensor) -> Tensor:
    """Return exp(exponent), and zero with a zero gradient where that is NaN or infinite."""
    finite = torch.isfinite(torch.exp(exponent.detach()))
    return torch.where(finite, torch.exp(torch.where(finite, exponent, 0.0)), 0.0)
