"""The metrics of an evaluation against hand computations, and against the enumeration of all subsets."""

import math
from collections import Counter
from itertools import combinations
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from nemo_rl_mcore.tools.evaluate.samples import (
    Estimate,
    SampleRow,
    maj_at_k,
    over_prompts,
    pass_at_k,
    set_metrics,
)

SAMPLES = st.lists(st.tuples(st.sampled_from([None, 0, 1, 2, 3]), st.booleans()), min_size=1, max_size=8)


def scored(reward, tokens, finished, vote):
    return SampleRow(0, 0, "", "", reward, None, "", tokens, finished, vote)


def elected(subset, votes):
    """The place of the sample that a subset elects, by counting."""
    counts = Counter(votes[place] for place in subset if votes[place] is not None)
    if not counts:
        return None
    most = max(counts.values())
    return next(place for place in subset if counts.get(votes[place]) == most)


def test_pass_at_k_by_hand():
    # 5 samples, 2 correct: a pair misses both in C(3,2) = 3 of 10 ways.
    correct = [True, False, False, True, False]
    assert pass_at_k(correct, 1) == 0.4
    assert pass_at_k(correct, 2) == 0.7
    assert pass_at_k(correct, 3) == 0.9
    assert pass_at_k(correct, 4) == pass_at_k(correct, 5) == 1.0
    assert pass_at_k([False] * 5, 5) == 0.0


def test_pass_at_k_stays_exact_where_factors_would_round():
    assert pass_at_k([True] + [False] * 9999, 1) == 1e-4
    assert pass_at_k([True] + [False] * 9999, 5000) == 0.5


def test_maj_at_k_by_hand():
    votes = [0, 1, 1, 0, None]
    correct = [True, False, False, True, False]
    assert maj_at_k(votes, correct, 1) == 0.4
    # Of all five both answers have two votes, and the first one was given first.
    assert maj_at_k(votes, correct, 5) == 1.0
    # Pairs: (0,1) (0,2) (0,3) (0,4) (3,4) elect a correct sample; (1,3) and (2,3) tie, and 1 and 2 came first.
    assert maj_at_k(votes, correct, 2) == 0.5
    assert maj_at_k([None, None], [False, False], 2) == 0.0


@given(SAMPLES)
def test_both_equal_the_enumeration_of_all_subsets(samples):
    votes, correct = [vote for vote, _ in samples], [right for _, right in samples]
    for k in range(1, len(samples) + 1):
        subsets = [*combinations(range(len(samples)), k)]
        passing = sum(any(correct[place] for place in subset) for subset in subsets)
        winners = [elected(subset, votes) for subset in subsets]
        right = sum(place is not None and correct[place] for place in winners)
        assert pass_at_k(correct, k) == passing / len(subsets)
        assert maj_at_k(votes, correct, k) == right / len(subsets)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("metric", [pass_at_k, lambda correct, k: maj_at_k([0, 1], correct, k)])
def test_more_samples_than_there_are_cannot_be_drawn(metric, k):
    with refused("too-few-samples", f"k = {k} ", 2):
        metric([True, False], k)


def test_the_error_is_of_means_of_prompts():
    # By samples it would be the standard deviation of 0, 0, 1, 1 over 2.
    found = over_prompts([0.0, 1.0])
    assert found == Estimate(0.5, pytest.approx(math.sqrt(0.5) / math.sqrt(2)))
    values = [0.1, 0.7, 0.4]
    assert over_prompts(values) == Estimate(
        pytest.approx(mean(values)), pytest.approx(stdev(values) / 3**0.5)
    )
    assert over_prompts([0.3]) == Estimate(0.3, None)


def test_a_set_by_hand():
    one = [scored(1.0, 4, True, 0), scored(0.5, 8, False, 1)]
    other = [scored(0.0, 2, True, 0), scored(0.0, 2, True, 0)]
    found = {name: estimate.mean for name, estimate in set_metrics([one, other], [1, 2]).items()}
    assert found == {
        "reward": 0.375,
        "accuracy": 0.25,
        "pass@1": 0.25,
        "pass@2": 0.5,
        "maj@1": 0.25,
        "maj@2": 0.5,
        "tokens": 4.0,
        "truncated": 0.25,
    }
    assert set_metrics([one, other], [1])["accuracy"].stderr == 0.25
