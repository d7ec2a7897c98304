"""Draw tokens from logits, with noise that depends on the sample alone, not on its batch, row or rank.

Shapes: B rows or N tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """Logits are divided by the temperature, then cut to top-k (None: all), then to top-p; greedy ignores all three."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    greedy: bool = False

    @property
    def filters(self) -> bool:
        return not self.greedy and (self.top_k is not None or self.top_p < 1.0)


def sample_tokens(logits_BV: Tensor, uniforms_B: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw a token per row by inverse transform sampling: (ids int64 [B], log-probabilities fp32 [B]).

    logits_BV: any float dtype; uniforms_B: float64 in [0, 1). The log-probabilities are those of the distribution that
    is sampled, as in training; greedy: those of the model at the temperature.
    """
    scaled_BV = at_temperature(filter_logits(logits_BV.float(), params), params.temperature)
    logprobs_BV = torch.log_softmax(scaled_BV, dim=-1)
    if params.greedy:
        tokens_B = logprobs_BV.argmax(-1)
    else:
        # In float64 the cumulative distribution of a large vocabulary still ends at one.
        cumulative_BV = scaled_BV.double().softmax(-1).cumsum(-1)
        thresholds_B1 = (uniforms_B * cumulative_BV[:, -1]).unsqueeze(1)
        tokens_B = torch.searchsorted(cumulative_BV, thresholds_B1, right=True).squeeze(1)
        tokens_B = tokens_B.clamp_(max=logits_BV.shape[1] - 1)
    return tokens_B, logprobs_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)


def at_temperature(logits_BV: Tensor, temperature: float) -> Tensor:
    """Return the logits divided by the temperature, fp32 (fp64 for fp64)."""
    return logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32)) / temperature


def filter_logits(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """Set tokens outside top-k or top-p to -inf."""
    if not params.filters:
        return logits_BV
    return logits_BV.masked_fill(LeastToken.of(logits_BV, params).excludes(logits_BV), -torch.inf)


@dataclass(frozen=True)
class LeastToken:
    """Each row's smallest token inside top-k and top-p, by logit and, among equal logits, by id; both [N, 1].

    The mask is vLLM's and NeMo RL's: all tokens whose logits equal the k-th largest stay; of those, tokens are removed
    in ascending order as long as their probabilities sum to at most 1 - p; the largest always stays.
    """

    logit_N1: Tensor
    id_N1: Tensor

    @classmethod
    def of(cls, logits_NV: Tensor, params: SamplingParams) -> Self:
        ascending_NV, id_NV = logits_NV.sort(dim=-1, stable=True)
        scaled_NV, vocabulary = at_temperature(ascending_NV, params.temperature), logits_NV.shape[1]
        if params.top_k is not None and params.top_k < vocabulary:
            below_NV = ascending_NV < ascending_NV[:, -params.top_k, None]
            scaled_NV = scaled_NV.masked_fill(below_NV, -torch.inf)
        dropped_NV = scaled_NV == -torch.inf
        if params.top_p < 1.0:
            dropped_NV |= scaled_NV.softmax(-1).cumsum(-1) <= 1 - params.top_p
        first_N1 = dropped_NV.sum(-1, keepdim=True).clamp(max=vocabulary - 1)
        return cls(ascending_NV.gather(1, first_N1), id_NV.gather(1, first_N1))

    def at(self, rows: slice) -> Self:
        return type(self)(self.logit_N1[rows], self.id_N1[rows])

    def excludes(self, logits_NV: Tensor, first_id: int = 0) -> Tensor:
        """Return bool [N, V], true for tokens that are filtered out; the first column has `first_id`. NaN stays."""
        id_V = torch.arange(first_id, first_id + logits_NV.shape[1], device=logits_NV.device)
        tied_NV = (logits_NV == self.logit_N1) & (id_V < self.id_N1)
        return (logits_NV < self.logit_N1) | tied_NV


def sample_keys(
    seed: int, step: int, prompts_B: Tensor, samples_B: Tensor, turns_B: Tensor | None = None
) -> Tensor:
    """Return a 64-bit key [B] for each (seed, step, prompt, sample, turn), all int64 [B]; None is turn 0."""
    key_B = torch.full_like(prompts_B, seed)
    for part in (torch.full_like(prompts_B, step), prompts_B, samples_B):
        key_B = splitmix64(key_B) ^ part
    key_B = splitmix64(key_B)
    if turns_B is None:
        return key_B
    # The first turn has the same key as an answer without turns.
    return torch.where(turns_B == 0, key_B, splitmix64(key_B ^ turns_B))


def keyed_uniforms(keys_B: Tensor, position: int) -> Tensor:
    """Return uniform numbers in [0, 1), float64 [B], one per key at this position of its sequence."""
    bits_B = splitmix64(keys_B + signed_64(position * GOLDEN_GAMMA))
    return ((bits_B >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def splitmix64(state: Tensor) -> Tensor:
    """Apply SplitMix64's output function (Steele, Lea and Flood, 2014) to int64 tensors, whose overflow wraps."""
    mixed = state + signed_64(GOLDEN_GAMMA)
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # A logical shift: torch's own extends the sign.
        shifted = (mixed >> bits) & ((1 << (64 - bits)) - 1)
        mixed = (mixed ^ shifted) * signed_64(factor)
    return mixed


def signed_64(value: int) -> int:
    """Return the low 64 bits of a Python int as an int64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def bound_of(new_tokens: int, longest: int | None, prompt_tokens: int) -> int:
    """Return a response's maximum length: `new_tokens`, or the room that the prompt leaves in `longest`."""
    return new_tokens if longest is None else min(new_tokens, longest - prompt_tokens)
