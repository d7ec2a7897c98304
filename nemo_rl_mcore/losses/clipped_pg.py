"""The clipped policy-gradient loss and its family.

PPO https://arxiv.org/abs/1707.06347, GRPO 2402.03300, DAPO's two-sided clip 2503.14476, dual clip 1912.09729,
GSPO 2507.18071, CISPO 2506.13585, REINFORCE and RLOO 2402.14740. A configuration picks one ratio, one
surrogate and one importance weight; everything after that is shared.

All tensors are [B,S-1] in the next-token frame, zero where no token counts. c = current, p = previous, g = generation,
r = reference log-probabilities, A = advantages. p and c are computed by the training engine, g by the one that sampled.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_mcore.config import checked
from nemo_rl_mcore.config.loss import ClippedPGLossConfig, KLType
from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.data.columns import Column, ColumnKind
from nemo_rl_mcore.losses.base import (
    LossSums,
    LossType,
    Masks,
    MetricKind,
    MetricSum,
    TokenLossFunction,
    TokenOutputs,
    gradient_kind,
    require,
)
from nemo_rl_mcore.losses.kl import ROW_NUMBER, finite_exp, kl_estimate, log_ratio_estimate, sampler_table


@dataclass(frozen=True)
class PolicyTokens:
    """Tensors [B, S] from which the terms of the loss are computed; unfiltered: current, for the KL penalty."""

    current: Tensor
    unfiltered: Tensor
    previous: Tensor
    generation: Tensor
    advantages: Tensor
    reference: Tensor | None
    entropy: Tensor | None
    outside: Tensor
    masks: Masks


@dataclass(frozen=True)
class ImportanceWeights:
    """Weights per token [B,S-1], or per sequence on its rows [B,1], and the share changed by the bounds (if any).

    overflowed: bool, of the weights' shape: a ratio beyond the number format, whose weight is 0.
    """

    weights: Tensor
    overflowed: Tensor
    out_of_bounds: MetricSum | None = None


def importance_weights(cfg: ClippedPGLossConfig, log_ratio: Tensor, masks: Masks) -> ImportanceWeights:
    """Return the weights of a configuration, used or (without the correction) only reported.

    log_ratio: p - g. Raw weights are its exp, per token or of its sum over the sequence's valid tokens; NaN and
    infinities count as 0. They are clamped to the bounds (tis), zero outside them (IcePop), or zero in the sequences
    whose geometric-mean ratio over tokens leaves them (seq-mask-tis).
    """
    exponent = log_ratio
    if cfg.sequence_level_importance_ratios:
        exponent = masks.over_sequence((log_ratio * masks.valid).sum(dim=-1))[:, None]
    raw, overflowed = finite_exp(exponent), ~torch.isfinite(torch.exp(exponent))
    kind, upper = cfg.truncated_importance_sampling_type, cfg.truncated_importance_sampling_ratio
    if kind is None or upper is None:
        return ImportanceWeights(raw, overflowed)
    lower = cfg.truncated_importance_sampling_ratio_min or 0.0
    if kind == "seq-mask-tis":
        finite = torch.where(torch.isfinite(log_ratio), log_ratio, 0.0)
        geometric_mean = torch.exp(masks.sequence_mean(finite))
        inside = (geometric_mean >= lower) & (geometric_mean <= upper)
        dropped = MetricSum(masks.sequence_sum((~inside).to(log_ratio.dtype)), MetricKind.SEQUENCES)
        return ImportanceWeights(torch.where(inside[:, None], raw, 0.0), overflowed, dropped)
    inside = (raw >= lower) & (raw <= upper)
    held = raw.clamp(lower, upper) if kind == "tis" else torch.where(inside, raw, 0.0)
    return ImportanceWeights(held, overflowed, masks.token_metric((~inside).to(masks.valid.dtype)))


class ClippedPGLossFn(TokenLossFunction):
    """The clipped policy-gradient loss with KL penalty, importance correction and entropy bonus.

    >>> loss = ClippedPGLossFn({"reference_policy_kl_penalty": 0.0})
    >>> [column.key for column in loss.columns]  # the batch columns that it reads
    ['prev_logprobs', 'generation_logprobs', 'advantages']
    """

    def __init__(
        self,
        cfg: ClippedPGLossConfig | Mapping[str, object],
        use_fused_linear_logprobs: bool = False,
        own_previous: bool = False,
    ) -> None:
        """own_previous: use the pass's own log-probabilities as prev_logprobs; the batch then has a `row_number`."""
        self.cfg = checked(ClippedPGLossConfig, cfg)
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self.loss_type = LossType.TOKEN_LEVEL if self.cfg.token_level_loss else LossType.SEQUENCE_LEVEL
        self.kl_penalty = 0.0 if self.cfg.use_kl_in_reward else self.cfg.reference_policy_kl_penalty
        self.needs_entropy = self.cfg.entropy_coef != 0
        self.gives_row_table = own_previous
        compared = "the comparison of training with generation (token_mult_prob_error and its like)"
        if self.cfg.use_importance_sampling_correction:
            compared = "use_importance_sampling_correction: true"
        elif self.cfg.use_on_policy_kl_approximation:
            compared = "use_on_policy_kl_approximation: true"
        self.own_columns = list[Column]()
        if not (self.cfg.force_on_policy_ratio or own_previous):
            needed_by = "force_on_policy_ratio: false"
            self.own_columns.append(Column("prev_logprobs", needed_by, ColumnKind.BELOW_INFINITY))
        self.own_columns.append(Column("generation_logprobs", compared))
        self.own_columns.append(Column("advantages", "the policy gradient", ColumnKind.NUMBERS))
        if self.kl_penalty:
            needed_by = f"reference_policy_kl_penalty: {self.kl_penalty}"
            self.own_columns.append(Column("reference_policy_logprobs", needed_by))

    def sums(self, outputs: TokenOutputs, data: BatchedDataDict) -> LossSums:
        cfg, tokens = self.cfg, self._read(outputs, data)
        masks, as_gradient, kl_type = (
            tokens.masks,
            gradient_kind(self.loss_type),
            cfg.reference_policy_kl_type,
        )
        ratio, clipped = self._ratios(tokens)
        weights = importance_weights(cfg, tokens.previous - tokens.generation, masks)
        surrogate = self._surrogate(ratio, clipped, tokens)
        if cfg.use_importance_sampling_correction:
            surrogate = weights.weights * surrogate
        kl = tokens.current.new_zeros(())  # before its coefficient
        if tokens.reference is not None:
            current = tokens.unfiltered  # as the reference is
            sampled = tokens.generation if cfg.use_on_policy_kl_approximation else current.detach()
            per_token = kl_estimate(
                current,
                tokens.reference,
                kl_type,
                input_clamp=cfg.kl_input_clamp_value,
                output_clamp=cfg.kl_output_clamp_value,
                weight=finite_exp(current - sampled),
            )
            kl = masks.reduce(per_token, self.loss_type)
        loss = masks.reduce(surrogate, self.loss_type) + self.kl_penalty * kl
        if self.needs_entropy and tokens.entropy is not None:
            loss = loss - cfg.entropy_coef * masks.reduce(tokens.entropy, self.loss_type)
        table = None
        with torch.no_grad():
            metrics = {
                "loss": MetricSum(loss.detach(), as_gradient),
                "kl_penalty": MetricSum(kl.detach(), as_gradient),
                **ratio_metrics(ratio, clipped, masks),
                **mismatch_metrics(tokens, kl_type),
                "sampling_importance_ratio": masks.token_metric(weights.weights),
                "is_overflow_ratio": masks.token_metric(weights.overflowed.to(masks.valid.dtype)),
                "num_valid_samples": MetricSum(masks.sequences.sum(), MetricKind.NONE),
            }
            if cfg.sequence_level_importance_ratios:
                of_sequences = masks.sequence_sum(weights.weights[:, 0])
                metrics["sampling_importance_ratio"] = MetricSum(of_sequences, MetricKind.SEQUENCES)
            if weights.out_of_bounds is not None:
                metrics["is_oob_ratio"] = weights.out_of_bounds
            if tokens.entropy is not None:
                metrics["entropy"] = masks.token_metric(tokens.entropy)
            if outputs.unfiltered is not None:
                metrics["num_tokens_outside_filters"] = MetricSum(tokens.outside.sum(), MetricKind.NONE)
            if self.gives_row_table:
                numbers = require(data, ROW_NUMBER, "a loss without prev_logprobs").double()
                rows = sampler_table(tokens.generation, tokens.previous, masks.valid > 0, kl_type)
                table = torch.cat([numbers[:, None], rows], dim=1)
        return LossSums(loss, metrics, table)

    def _read(self, outputs: TokenOutputs, data: BatchedDataDict) -> PolicyTokens:
        masks = Masks.of(data, outputs.logprobs.dtype)
        current = masks.keep(outputs.logprobs, "logprobs")
        if self.needs_entropy and outputs.entropy is None:
            raise ValueError(
                f"entropy_coef: {self.cfg.entropy_coef} needs the entropy of the model's outputs"
            )
        given = {column.key: masks.read(data, column.key, column.needed_by) for column in self.own_columns}
        previous, generation = given.get("prev_logprobs", current.detach()), given["generation_logprobs"]
        # A token outside the filters then or now has no ratio: as a constant it has no gradient.
        outside = (current == -torch.inf) | (previous == -torch.inf)
        unfiltered = current if outputs.unfiltered is None else masks.keep(outputs.unfiltered, "unfiltered")
        return PolicyTokens(
            current=torch.where(outside, generation, current),
            unfiltered=unfiltered,
            previous=torch.where(outside, generation, previous),
            generation=generation,
            outside=outside,
            advantages=given["advantages"],
            reference=given.get("reference_policy_logprobs"),
            entropy=None if outputs.entropy is None else masks.keep(outputs.entropy, "entropy"),
            masks=masks,
        )

    def _ratios(self, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
        """Return each token's ratio, and the ratio clamped to the clipping bounds.

        REINFORCE: the log-probability replaces the ratio, and nothing is clipped. On policy it is 1, with the
        gradient of c; GSPO's is of the sequence's mean of c - p, repeated on its tokens; else it is exp(c - p).

        Where the surrogate clips it from above, at `upper` or (A < 0) at the dual clip, the ratio is kept
        finite: the gradient there is zero times the ratio, which must not be infinite. Where A < 0 without a dual clip,
        -A * ratio counts however large it is, and an infinite one correctly skips the step.
        """
        cfg, current = self.cfg, tokens.current
        if cfg.disable_ppo_ratio and not cfg.force_on_policy_ratio:
            return current, current
        exponent = current - (current.detach() if cfg.force_on_policy_ratio else tokens.previous)
        if cfg.sequence_level_importance_ratios and not cfg.force_on_policy_ratio:
            exponent = tokens.masks.sequence_mean(exponent)[:, None].expand_as(current)
        lower, upper = 1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max
        # exp(80) leaves fp32 room for advantages, and is beyond the usual bounds.
        held = exponent.clamp(max=max(80.0, math.log(upper) + 1))
        held_below = exponent
        if cfg.ratio_clip_c is not None:
            held_below = exponent.clamp(max=max(80.0, math.log(cfg.ratio_clip_c) + 1))
        ratio = torch.exp(torch.where(tokens.advantages < 0, held_below, held))
        return ratio, ratio.clamp(lower, upper)

    def _surrogate(self, ratio: Tensor, clipped: Tensor, tokens: PolicyTokens) -> Tensor:
        """Return PPO's surrogate, the larger of -A * ratio and -A * clipped; dual clip: at most -A * bound for A < 0.

        CISPO: -A * c, weighted by the clipped ratio, which carries no gradient.
        """
        advantages, bound = tokens.advantages, self.cfg.ratio_clip_c
        if self.cfg.use_cispo:
            return -advantages * clipped.detach() * tokens.current
        surrogate = torch.maximum(-advantages * ratio, -advantages * clipped)
        if bound is None:
            return surrogate
        return torch.where(advantages < 0, torch.minimum(surrogate, -advantages * bound), surrogate)


def ratio_metrics(ratio: Tensor, clipped: Tensor, masks: Masks) -> dict[str, MetricSum]:
    """Return the means and extrema of the ratio and of its clipped twin, and the share of tokens where they differ."""
    metrics: dict[str, MetricSum] = {}
    for name, values in (("probs_ratio", ratio), ("probs_ratio_clamped", clipped)):
        metrics[name] = masks.token_metric(values)
        least, most = masks.extrema(values)
        metrics[f"{name}_min"] = MetricSum(least, MetricKind.MIN)
        metrics[f"{name}_max"] = MetricSum(most, MetricKind.MAX)
    metrics["probs_ratio_clipfrac"] = masks.token_metric((ratio != clipped).to(ratio.dtype))
    return metrics


def mismatch_metrics(tokens: PolicyTokens, kl_type: KLType) -> dict[str, MetricSum]:
    """Return metrics of the difference between the training and the generation engine's log-probabilities."""
    current, previous, generation = tokens.current, tokens.previous, tokens.generation
    mixture = torch.logaddexp(previous, generation) - math.log(2)
    per_token = {
        "token_mult_prob_error": torch.exp((generation - previous).abs()),
        "gen_kl_error": kl_estimate(generation, previous, kl_type),
        "policy_kl_error": kl_estimate(previous, generation, kl_type),
        "js_divergence_error": 0.5 * log_ratio_estimate(previous - mixture, "k3")
        + 0.5 * log_ratio_estimate(generation - mixture, "k3"),
        "approx_entropy": -torch.exp(current - generation) * current,
    }
    return {name: tokens.masks.token_metric(values) for name, values in per_token.items()}
