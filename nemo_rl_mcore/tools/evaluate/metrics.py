"""What the scored answers to a set of prompts amount to.

Of each prompt there are n samples. One is correct when its reward is at least 1, full marks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from nemo_rl_mcore.errors import RefusedError


@dataclass(frozen=True)
class Scored:
    """A sample, as far as metrics read it.

    tokens: its length. finished: it ended by itself, not at the length limit. vote: the number, among the samples of
    its prompt, of the first one that gives the same answer; None for one that gives none.
    """

    reward: float
    tokens: int
    finished: bool
    vote: int | None

    @property
    def correct(self) -> bool:
        """Return whether it has full marks."""
        return self.reward >= 1.0


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its standard error; `stderr` is None with one prompt, which tells nothing of others."""

    mean: float
    stderr: float | None


def pass_at_k(correct: Sequence[bool], k: int) -> float:
    """Return the chance that of k samples, drawn from the n without replacement, at least one is correct.

    1 - C(n-c, k) / C(n, k) with c correct ones, in exact integers: the unbiased estimator of arXiv 2107.03374.
    Raises ValueError unless 1 <= k <= n.
    """
    samples = len(correct)
    _require(k, samples)
    return float(1 - Fraction(math.comb(samples - sum(correct), k), math.comb(samples, k)))


def maj_at_k(votes: Sequence[int | None], correct: Sequence[bool], k: int) -> float:
    """Return the chance that the majority of k samples, drawn from the n without replacement, is correct.

    Of the C(n, k) subsets of the samples, each in the samples' order, the share in which the elected sample is
    correct. Samples with equal votes give the same answer; None gives none and elects nobody. The answer that most
    samples of the subset give wins, of several the one that was given first; the elected sample is the first that gives
    it. A subset without an answer is wrong. With k = n this is the majority of all samples. In exact integers.
    Raises ValueError unless 1 <= k <= n.
    """
    samples = len(votes)
    _require(k, samples)
    places: dict[int, list[int]] = {}
    for place, vote in enumerate(votes):
        if vote is not None:
            places.setdefault(vote, []).append(place)
    silent = sum(vote is None for vote in votes)
    won = sum(
        _subsets_won_by(first, rank, places[vote], [*places.values()], silent, k)
        for vote in places
        for rank, first in enumerate(places[vote])
        if correct[first]
    )
    return float(Fraction(won, math.comb(samples, k)))


def _subsets_won_by(
    first: int, rank: int, own: Sequence[int], answers: Sequence[Sequence[int]], silent: int, k: int
) -> int:
    """Count the subsets of k samples that elect the one at the place `first`, the one of that rank among its answer's.

    answers: the places of the samples of each answer, its own among them; silent: samples without an answer.
    """
    later = len(own) - rank - 1
    won = 0
    for size in range(1, min(k, later + 1) + 1):  # of its answer's share of the subset
        # Ways to fill the rest: coefficient i of a polynomial is that with i samples.
        rest = [math.comb(silent, taken) for taken in range(silent + 1)]
        for other in answers:
            if other is not own:
                behind = sum(place > first for place in other)
                fewer = [math.comb(len(other), taken) for taken in range(min(size, len(other) + 1))]
                rest = _product([*fewer, math.comb(behind, size)], rest, k - size)
        if k - size < len(rest):
            won += math.comb(later, size - 1) * rest[k - size]
    return won


def _product(one: Sequence[int], other: Sequence[int], degree: int) -> list[int]:
    """Return the product of two polynomials up to a degree."""
    product = [0] * (min(degree, len(one) + len(other) - 2) + 1)
    for low, factor in enumerate(one[: degree + 1]):
        for place, value in enumerate(other[: degree + 1 - low], start=low):
            product[place] += factor * value
    return product


def _require(k: int, samples: int) -> None:
    if not 1 <= k <= samples:
        raise RefusedError(
            f"k = {k} needs as many samples of a prompt, and there are {samples}", code="too-few-samples"
        )


def over_prompts(values: Sequence[float]) -> Estimate:
    """Return the mean of one value a prompt, with the standard error of a mean over drawn prompts: sd / sqrt(prompts).

    Samples of one prompt resemble each other. Values that are means over them make this the clustered error.
    """
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count))


def set_metrics(prompts: Sequence[Sequence[Scored]], k_values: Sequence[int]) -> dict[str, Estimate]:
    """Return what a set amounts to; `prompts` has the samples of each prompt, in their order.

    reward and accuracy, the share of correct samples; pass@k and maj@k for each k; tokens, the length of a response;
    truncated, the share that ended at the length limit.
    """
    metrics = {
        "reward": [_mean([sample.reward for sample in samples]) for samples in prompts],
        "accuracy": [_mean([sample.correct for sample in samples]) for samples in prompts],
    }
    for k in k_values:
        metrics[f"pass@{k}"] = [pass_at_k([sample.correct for sample in samples], k) for samples in prompts]
    for k in k_values:
        metrics[f"maj@{k}"] = [
            maj_at_k([sample.vote for sample in samples], [sample.correct for sample in samples], k)
            for samples in prompts
        ]
    metrics["tokens"] = [_mean([sample.tokens for sample in samples]) for samples in prompts]
    metrics["truncated"] = [_mean([not sample.finished for sample in samples]) for samples in prompts]
    return {name: over_prompts(values) for name, values in metrics.items()}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
