"""Whose turn it is among sources with weights: exact shares of any number of turns, without chance."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from math import gcd, lcm

MOST_TURNS = 10_000
"""Turns after which the order starts over, at most."""


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in the ratio of weights, taken as the decimals that they are written as."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    common = gcd(*whole)
    return [weight // common for weight in whole]


class Shares:
    """Turns of sources: after any number of them, a source has had its share of them up to less than one turn.

    The order is that of Tijdeman (The chairman assignment problem, 1980); it starts over after the sum of the whole
    weights, where all shares are exact.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.names = tuple(weights)
        self._weights = whole_weights([*weights.values()])
        self.period = sum(self._weights)
        self._turns = _turns(self._weights)
        self._before = [
            [0, *accumulate(int(turn == source) for turn in self._turns)] for source in range(len(self.names))
        ]

    def turn(self, position: int) -> int:
        """Return whose turn it is, from position 0 on."""
        return self._turns[position % self.period]

    def before(self, source: int, position: int) -> int:
        """Return how many turns a source has had before a position."""
        rounds, place = divmod(position, self.period)
        return rounds * self._weights[source] + self._before[source][place]

    def most(self, source: int, turns: int, every: int) -> int:
        """Return the most turns that a source has in `turns` of them that begin at a multiple of `every`."""
        starts = range(0, self.period, gcd(every, self.period))
        return max(self.before(source, start + turns) - self.before(source, start) for start in starts)


def _turns(weights: Sequence[int]) -> list[int]:
    """Return the turns of one round; among those that may not wait, it is that of the share that runs out first."""
    sources, period = len(weights), sum(weights)
    if sources == 1:
        return [0] * period
    had, turns = [0] * sources, list[int]()
    slack = 2 * sources - 2
    for number in range(1, period + 1):
        # Of source i, lag[i] / period is its share of the turns up to this one, less those that it has had.
        lag = [weights[i] * number - had[i] * period for i in range(sources)]
        may = [i for i in range(sources) if lag[i] * slack >= period]
        chosen = min(may, key=lambda i: (Fraction(period * (slack - 1) - lag[i] * slack, weights[i]), i))
        had[chosen] += 1
        turns.append(chosen)
    return turns
