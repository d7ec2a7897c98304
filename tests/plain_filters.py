"""Top-k and top-p by their definition, token by token in Python."""

import math

import torch
from torch import Tensor


def kept_tokens(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> Tensor:
    """True at the tokens that may be sampled: top-k with its ties first, then top-p, the largest token always.

    Top-p goes through the tokens from the smallest on, of equal ones the smaller id first, and drops each as long as
    the probabilities up to and with it sum to at most 1 - p.
    """
    rows = [_kept(row, temperature, top_k, top_p) for row in logits.detach().double().flatten(0, -2).tolist()]
    return torch.tensor(rows).view(logits.shape)


def _kept(row: list[float], temperature: float, top_k: int | None, top_p: float) -> list[bool]:
    left = sorted(range(len(row)), key=lambda token: (row[token], token))
    if top_k is not None and top_k < len(row):
        left = [token for token in left if row[token] >= row[left[-top_k]]]
    if top_p < 1:
        weights = [math.exp((row[token] - row[left[-1]]) / temperature) for token in left]
        dropped = 0.0
        for token, weight in [*zip(left, weights, strict=True)][:-1]:
            dropped += weight
            if dropped > (1 - top_p) * sum(weights):
                break
            left.remove(token)
    return [token in left for token in range(len(row))]


def filtered_logprobs(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, **filters: float | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropy of the filtered distribution, differentiable; -inf for a target outside."""
    kept = kept_tokens(logits, temperature, **filters)
    logp = (logits / temperature).masked_fill(~kept, -torch.inf).log_softmax(-1)
    finite = torch.where(kept, logp, 0.0)
    chosen = torch.where(kept, logp, -torch.inf).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen, -(finite.exp() * finite).sum(-1)
