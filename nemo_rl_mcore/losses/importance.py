"""Weights that correct for sampling from another distribution than the training engine computes.

Shapes: [B,S-1] in the next-token frame, zero where no token counts. p = log-probabilities of the policy that
sampled, computed by the training engine; g = the same by the generation engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nemo_rl_mcore.config.loss import ClippedPGLossConfig
from nemo_rl_mcore.losses.base import Masks, MetricKind, MetricSum
from nemo_rl_mcore.losses.kl import finite_exp


@dataclass(frozen=True)
class ImportanceWeights:
    """Weights per token [B,S-1], or per sequence on its rows [B,1], and what share the bounds touched (if any)."""

    weights: Tensor
    out_of_bounds: MetricSum | None = None


WeightFunction = Callable[[Tensor, Masks], ImportanceWeights]


def token_weights(log_ratio: Tensor, masks: Masks) -> ImportanceWeights:
    """Return exp(p - g) per token; NaN and infinities count as 0."""
    return ImportanceWeights(finite_exp(log_ratio))


def sequence_weights(log_ratio: Tensor, masks: Masks) -> ImportanceWeights:
    """Return exp(sum of p - g over the sequence's valid tokens), on each of its rows [B,1]."""
    return ImportanceWeights(finite_exp(masks.over_sequence((log_ratio * masks.valid).sum(dim=-1))[:, None]))


def truncated(
    log_ratio: Tensor, masks: Masks, *, raw: WeightFunction, lower: float, upper: float
) -> ImportanceWeights:
    """Truncated importance sampling: the raw weights clamped to [lower, upper]."""
    weights = raw(log_ratio, masks).weights
    outside = (weights < lower) | (weights > upper)
    return ImportanceWeights(weights.clamp(lower, upper), _token_fraction(outside, masks))


def icepop(
    log_ratio: Tensor, masks: Masks, *, raw: WeightFunction, lower: float, upper: float
) -> ImportanceWeights:
    """IcePop: the raw weights, zero where they leave [lower, upper]."""
    weights = raw(log_ratio, masks).weights
    inside = (weights >= lower) & (weights <= upper)
    return ImportanceWeights(torch.where(inside, weights, 0.0), _token_fraction(~inside, masks))


def sequence_masked(
    log_ratio: Tensor, masks: Masks, *, raw: WeightFunction, lower: float, upper: float
) -> ImportanceWeights:
    """The raw weights, zero in the sequences whose geometric-mean ratio over tokens leaves [lower, upper]."""
    finite = torch.where(torch.isfinite(log_ratio), log_ratio, 0.0)
    geometric_mean = torch.exp(masks.sequence_mean(finite))
    inside = (geometric_mean >= lower) & (geometric_mean <= upper)
    dropped = MetricSum(masks.sequence_sum((~inside).to(log_ratio.dtype)), MetricKind.SEQUENCES)
    return ImportanceWeights(torch.where(inside[:, None], raw(log_ratio, masks).weights, 0.0), dropped)


_TRUNCATIONS = {"tis": truncated, "icepop": icepop, "seq-mask-tis": sequence_masked}


def weight_function(cfg: ClippedPGLossConfig) -> WeightFunction:
    """Return the weights of a configuration, used or (without the correction) only reported."""
    raw = sequence_weights if cfg.sequence_level_importance_ratios else token_weights
    kind, upper = cfg.truncated_importance_sampling_type, cfg.truncated_importance_sampling_ratio
    if kind is None or upper is None:
        return raw
    lower = cfg.truncated_importance_sampling_ratio_min or 0.0
    return partial(_TRUNCATIONS[kind], raw=raw, lower=lower, upper=upper)


def _token_fraction(outside: Tensor, masks: Masks) -> MetricSum:
    return MetricSum(masks.token_sum(outside.to(masks.valid.dtype)), MetricKind.TOKENS)
