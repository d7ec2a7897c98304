"""Weights that correct for sampling from another distribution than the training engine computes.

Shapes: [B,S-1] in the next-token frame, zero where no token counts. p = log-probabilities of the policy that
sampled, computed by the training engine; g = the same by the generation engine.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from nemo_rl_mcore.config.loss import ClippedPGLossConfig
from nemo_rl_mcore.losses.base import Masks, MetricKind, MetricSum
from nemo_rl_mcore.losses.kl import finite_exp


@dataclass(frozen=True)
class ImportanceWeights:
    """Weights per token [B,S-1], or per sequence on its rows [B,1], and what share the bounds touched (if any).

    overflowed: bool, of the weights' shape: the ratio is more than the number format holds, so that its weight is 0.
    """

    weights: Tensor
    overflowed: Tensor
    out_of_bounds: MetricSum | None = None


WeightFunction = Callable[[Tensor, Masks], ImportanceWeights]


def token_weights(log_ratio: Tensor, masks: Masks) -> ImportanceWeights:
    """Return exp(p - g) per token; NaN and infinities count as 0."""
    return _exp(log_ratio)


def sequence_weights(log_ratio: Tensor, masks: Masks) -> ImportanceWeights:
    """Return exp(sum of p - g over the sequence's valid tokens), on each of its rows [B,1]."""
    return _exp(masks.over_sequence((log_ratio * masks.valid).sum(dim=-1))[:, None])


def _exp(log_weights: Tensor) -> ImportanceWeights:
    return ImportanceWeights(finite_exp(log_weights), ~torch.isfinite(torch.exp(log_weights)))


def truncated(
    log_ratio: Tensor, masks: Masks, *, raw: WeightFunction, lower: float, upper: float
) -> ImportanceWeights:
    """Truncate importance weights: the raw weights clamped to [lower, upper]."""
    found = raw(log_ratio, masks)
    outside = (found.weights < lower) | (found.weights > upper)
    clamped = found.weights.clamp(lower, upper)
    return replace(found, weights=clamped, out_of_bounds=token_fraction(outside, masks))


def icepop(
    log_ratio: Tensor, masks: Masks, *, raw: WeightFunction, lower: float, upper: float
) -> ImportanceWeights:
    """IcePop: the raw weights, zero where they leave [lower, upper]."""
    found = raw(log_ratio, masks)
    inside = (found.weights >= lower) & (found.weights <= upper)
    kept = torch.where(inside, found.weights, 0.0)
    return replace(found, weights=kept, out_of_bounds=token_fraction(~inside, masks))


def sequence_masked(
    log_ratio: Tensor, masks: Masks, *, raw: WeightFunction, lower: float, upper: float
) -> ImportanceWeights:
    """Return the raw weights, zero in the sequences whose geometric-mean ratio over tokens leaves [lower, upper]."""
    finite = torch.where(torch.isfinite(log_ratio), log_ratio, 0.0)
    geometric_mean = torch.exp(masks.sequence_mean(finite))
    inside = (geometric_mean >= lower) & (geometric_mean <= upper)
    dropped = MetricSum(masks.sequence_sum((~inside).to(log_ratio.dtype)), MetricKind.SEQUENCES)
    found = raw(log_ratio, masks)
    return replace(found, weights=torch.where(inside[:, None], found.weights, 0.0), out_of_bounds=dropped)


_TRUNCATIONS = {"tis": truncated, "icepop": icepop, "seq-mask-tis": sequence_masked}


def weight_function(cfg: ClippedPGLossConfig) -> WeightFunction:
    """Return the weights of a configuration, used or (without the correction) only reported."""
    raw = sequence_weights if cfg.sequence_level_importance_ratios else token_weights
    kind, upper = cfg.truncated_importance_sampling_type, cfg.truncated_importance_sampling_ratio
    if kind is None or upper is None:
        return raw
    lower = cfg.truncated_importance_sampling_ratio_min or 0.0
    return partial(_TRUNCATIONS[kind], raw=raw, lower=lower, upper=upper)


def token_fraction(chosen: Tensor, masks: Masks) -> MetricSum:
    """Return the share of the valid tokens that are chosen: bool [B,S-1], or [B,1] for all tokens of a row."""
    return MetricSum(masks.token_sum(chosen.to(masks.valid.dtype)), MetricKind.TOKENS)
