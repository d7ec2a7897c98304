"""The clipped policy-gradient loss and its family.

PPO https://arxiv.org/abs/1707.06347, GRPO 2402.03300, DAPO's two-sided clip 2503.14476, dual clip 1912.09729,
GSPO 2507.18071, CISPO 2506.13585, REINFORCE and RLOO 2402.14740. A configuration picks one ratio, one
surrogate and one importance weight; everything after that is shared.

All tensors are [B,S-1] in the next-token frame. c = current, p = previous, g = generation, r = reference
log-probabilities, A = advantages.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

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
from nemo_rl_mcore.losses.importance import ImportanceWeights, token_fraction, weight_function
from nemo_rl_mcore.losses.kl import finite_exp, kl_estimate, log_ratio_estimate
from nemo_rl_mcore.losses.sampler_table import ROW_NUMBER, sampler_table


@dataclass(frozen=True)
class PolicyTokens:
    """What the loss knows of each token; zero where no token counts."""

    current: Tensor
    previous: Tensor
    generation: Tensor
    advantages: Tensor
    reference: Tensor | None
    entropy: Tensor | None
    masks: Masks


@dataclass(frozen=True)
class Ratios:
    """The probability ratio of each token, and its clipped twin."""

    raw: Tensor
    clipped: Tensor


LogRatioFunction = Callable[[PolicyTokens], Tensor]
SurrogateFunction = Callable[[Ratios, PolicyTokens], Tensor]


def token_log_ratio(tokens: PolicyTokens) -> Tensor:
    """Return c - p."""
    return tokens.current - tokens.previous


def sequence_log_ratio(tokens: PolicyTokens) -> Tensor:
    """GSPO: return the sequence's mean of c - p, repeated on its tokens."""
    mean = tokens.masks.sequence_mean(tokens.current - tokens.previous)
    return mean[:, None].expand_as(tokens.current)


def on_policy_log_ratio(tokens: PolicyTokens) -> Tensor:
    """Return 0, with the gradient of c."""
    return tokens.current - tokens.current.detach()


def clipped_ratios(
    tokens: PolicyTokens, *, log_ratio: LogRatioFunction, lower: float, upper: float, dual: float | None
) -> Ratios:
    """Return a ratio and the same clamped to [lower, upper].

    Where the surrogate clips it from above, at `upper` or (A < 0) at `dual`, it is held at what exp can hold: the
    gradient there is zero times the ratio, which must not be infinite. Where A < 0 without a dual clip, -A * ratio
    counts however large it is, and an infinite one rightly skips the step.
    """
    exponent = log_ratio(tokens)
    held = exponent.clamp(max=_beyond(upper))
    held_below = exponent if dual is None else exponent.clamp(max=_beyond(dual))
    raw = torch.exp(torch.where(tokens.advantages < 0, held_below, held))
    return Ratios(raw, raw.clamp(lower, upper))


def _beyond(bound: float) -> float:
    """Return an exponent whose exp exceeds the bound: 80, which leaves fp32 room for advantages, for usual ones."""
    return max(80.0, math.log(bound) + 1)


def logprob_ratios(tokens: PolicyTokens) -> Ratios:
    """REINFORCE: the log-probability stands for the ratio, and nothing is clipped."""
    return Ratios(tokens.current, tokens.current)


def clipped_surrogate(ratios: Ratios, tokens: PolicyTokens) -> Tensor:
    """PPO: return the pessimistic one of -A * ratio and -A * clipped."""
    return torch.maximum(-tokens.advantages * ratios.raw, -tokens.advantages * ratios.clipped)


def cispo_surrogate(ratios: Ratios, tokens: PolicyTokens) -> Tensor:
    """CISPO: return -A * c, weighted by the clipped ratio, which carries no gradient."""
    return -tokens.advantages * ratios.clipped.detach() * tokens.current


def dual_clipped_surrogate(ratios: Ratios, tokens: PolicyTokens, *, bound: float) -> Tensor:
    """Dual clip: PPO's surrogate, at most -A * bound where A < 0."""
    surrogate = clipped_surrogate(ratios, tokens)
    bounded = torch.minimum(surrogate, -tokens.advantages * bound)
    return torch.where(tokens.advantages < 0, bounded, surrogate)


def ratio_function(cfg: ClippedPGLossConfig) -> Callable[[PolicyTokens], Ratios]:
    """Return the ratio of a configuration; force_on_policy_ratio goes before disable_ppo_ratio."""
    if cfg.disable_ppo_ratio and not cfg.force_on_policy_ratio:
        return logprob_ratios
    log_ratio = token_log_ratio
    if cfg.force_on_policy_ratio:
        log_ratio = on_policy_log_ratio
    elif cfg.sequence_level_importance_ratios:
        log_ratio = sequence_log_ratio
    return partial(
        clipped_ratios,
        log_ratio=log_ratio,
        lower=1 - cfg.ratio_clip_min,
        upper=1 + cfg.ratio_clip_max,
        dual=cfg.ratio_clip_c,
    )


def surrogate_function(cfg: ClippedPGLossConfig) -> SurrogateFunction:
    """Return the surrogate of a configuration."""
    if cfg.use_cispo:
        return cispo_surrogate
    if cfg.ratio_clip_c is not None:
        return partial(dual_clipped_surrogate, bound=cfg.ratio_clip_c)
    return clipped_surrogate


def policy_columns(
    cfg: ClippedPGLossConfig, kl_penalty: float, *, own_previous: bool = False
) -> Iterator[Column]:
    """Yield what a configuration reads of the batch; `kl_penalty` is that inside the loss.

    own_previous: the log-probabilities of the pass itself take the place of those before training.
    """
    if not (cfg.force_on_policy_ratio or own_previous):
        yield Column("prev_logprobs", "force_on_policy_ratio: false")
    generation_is_needed_by = (
        "the comparison of training with generation (token_mult_prob_error and its like)"
    )
    if cfg.use_importance_sampling_correction:
        generation_is_needed_by = "use_importance_sampling_correction: true"
    elif cfg.use_on_policy_kl_approximation:
        generation_is_needed_by = "use_on_policy_kl_approximation: true"
    yield Column("generation_logprobs", generation_is_needed_by)
    yield Column("advantages", "the policy gradient", ColumnKind.NUMBERS)
    if kl_penalty:
        yield Column("reference_policy_logprobs", f"reference_policy_kl_penalty: {kl_penalty}")


class ClippedPGLossFn(TokenLossFunction):
    """The clipped policy-gradient loss with KL penalty, importance correction and entropy bonus.

    >>> loss = ClippedPGLossFn({"reference_policy_kl_penalty": 0.0})
    >>> [column.key for column in loss.columns]  # what it reads of a batch
    ['prev_logprobs', 'generation_logprobs', 'advantages']
    """

    def __init__(
        self,
        cfg: ClippedPGLossConfig | Mapping[str, object],
        use_fused_linear_logprobs: bool = False,
        own_previous: bool = False,
    ) -> None:
        """own_previous: the pass's own log-probabilities take the place of prev_logprobs: no weight has changed since.

        The batch then has a `row_number`, and the sums a `row_table`: that number, then `sampler_table`.
        """
        self.cfg = checked(ClippedPGLossConfig, cfg)
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self.loss_type = LossType.TOKEN_LEVEL if self.cfg.token_level_loss else LossType.SEQUENCE_LEVEL
        self.kl_penalty = 0.0 if self.cfg.use_kl_in_reward else self.cfg.reference_policy_kl_penalty
        self._ratios = ratio_function(self.cfg)
        self._surrogate = surrogate_function(self.cfg)
        self._weights = weight_function(self.cfg)
        self.gives_row_table = own_previous
        self._columns = tuple(policy_columns(self.cfg, self.kl_penalty, own_previous=own_previous))

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return the log-probabilities and advantages, as far as the configuration reads them."""
        return (*super().columns, *self._columns)

    @property
    def needs_entropy(self) -> bool:
        """Return whether the loss has an entropy bonus."""
        return self.cfg.entropy_coef != 0

    def sums(self, outputs: TokenOutputs, data: BatchedDataDict) -> LossSums:
        """Return the un-normalised loss and metrics; ValueError when the batch lacks what they need."""
        tokens = self._read(outputs, data)
        ratios = self._ratios(tokens)
        weights = self._weights(tokens.previous - tokens.generation, tokens.masks)
        surrogate = self._surrogate(ratios, tokens)
        if self.cfg.use_importance_sampling_correction:
            surrogate = weights.weights * surrogate
        kl = self._kl_sum(tokens)
        loss = tokens.masks.reduce(surrogate, self.loss_type) + self.kl_penalty * kl
        if self.needs_entropy and tokens.entropy is not None:
            loss = loss - self.cfg.entropy_coef * tokens.masks.reduce(tokens.entropy, self.loss_type)
        as_gradient = gradient_kind(self.loss_type)
        with torch.no_grad():
            return LossSums(
                loss,
                {
                    "loss": MetricSum(loss.detach(), as_gradient),
                    "kl_penalty": MetricSum(kl.detach(), as_gradient),
                    **ratio_metrics(ratios, tokens.masks),
                    **mismatch_metrics(tokens, self.cfg.reference_policy_kl_type),
                    **self._sampling_metrics(weights, tokens),
                },
                self._row_table(tokens, data) if self.gives_row_table else None,
            )

    def _read(self, outputs: TokenOutputs, data: BatchedDataDict) -> PolicyTokens:
        masks = Masks.of(data, outputs.logprobs.dtype)
        current = masks.keep(outputs.logprobs, "logprobs")
        if self.needs_entropy and outputs.entropy is None:
            raise ValueError(
                f"entropy_coef: {self.cfg.entropy_coef} needs the entropy of the model's outputs"
            )
        given = {column.key: masks.read(data, column.key, column.needed_by) for column in self._columns}
        return PolicyTokens(
            current=current,
            previous=given["prev_logprobs"] if "prev_logprobs" in given else current.detach(),
            generation=given["generation_logprobs"],
            advantages=given["advantages"],
            reference=given.get("reference_policy_logprobs"),
            entropy=None if outputs.entropy is None else masks.keep(outputs.entropy, "entropy"),
            masks=masks,
        )

    def _kl_sum(self, tokens: PolicyTokens) -> Tensor:
        """Return the reduced KL before its coefficient; 0 when nothing is penalised."""
        if tokens.reference is None:
            return tokens.current.new_zeros(())
        sampled = tokens.generation if self.cfg.use_on_policy_kl_approximation else tokens.current.detach()
        kl = kl_estimate(
            tokens.current,
            tokens.reference,
            self.cfg.reference_policy_kl_type,
            input_clamp=self.cfg.kl_input_clamp_value,
            output_clamp=self.cfg.kl_output_clamp_value,
            weight=finite_exp(tokens.current - sampled),
        )
        return tokens.masks.reduce(kl, self.loss_type)

    def _row_table(self, tokens: PolicyTokens, data: BatchedDataDict) -> Tensor:
        numbers = require(data, ROW_NUMBER, "a loss without prev_logprobs").double()
        counted, kl_type = tokens.masks.valid > 0, self.cfg.reference_policy_kl_type
        table = sampler_table(tokens.generation, tokens.previous, counted, kl_type)
        return torch.cat([numbers[:, None], table], dim=1)

    def _sampling_metrics(self, weights: ImportanceWeights, tokens: PolicyTokens) -> dict[str, MetricSum]:
        masks = tokens.masks
        if self.cfg.sequence_level_importance_ratios:
            ratio = MetricSum(masks.sequence_sum(weights.weights[:, 0]), MetricKind.SEQUENCES)
        else:
            ratio = MetricSum(masks.token_sum(weights.weights), MetricKind.TOKENS)
        metrics = {
            "sampling_importance_ratio": ratio,
            "is_overflow_ratio": token_fraction(weights.overflowed, masks),
            "num_valid_samples": MetricSum(masks.sequences.sum(), MetricKind.NONE),
        }
        if weights.out_of_bounds is not None:
            metrics["is_oob_ratio"] = weights.out_of_bounds
        if tokens.entropy is not None:
            metrics["entropy"] = MetricSum(masks.token_sum(tokens.entropy), MetricKind.TOKENS)
        return metrics


def ratio_metrics(ratios: Ratios, masks: Masks) -> dict[str, MetricSum]:
    """Return the means and extrema of the ratio and of its clipped twin, and the share of tokens where they differ."""
    metrics: dict[str, MetricSum] = {}
    for name, values in (("probs_ratio", ratios.raw), ("probs_ratio_clamped", ratios.clipped)):
        metrics[name] = MetricSum(masks.token_sum(values), MetricKind.TOKENS)
        metrics[f"{name}_min"] = MetricSum(masks.minimum(values), MetricKind.MIN)
        metrics[f"{name}_max"] = MetricSum(masks.maximum(values), MetricKind.MAX)
    beyond = (ratios.raw != ratios.clipped).to(ratios.raw.dtype)
    metrics["probs_ratio_clipfrac"] = MetricSum(masks.token_sum(beyond), MetricKind.TOKENS)
    return metrics


def mismatch_metrics(tokens: PolicyTokens, kl_type: KLType) -> dict[str, MetricSum]:
    """Return how far the training engine's log-probabilities are from the generation engine's."""
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
    return {
        name: MetricSum(tokens.masks.token_sum(values), MetricKind.TOKENS)
        for name, values in per_token.items()
    }
