"""Sums of microbatches, of ranks and of steps."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_mcore.losses.base import MetricKind, MetricSum
from nemo_rl_mcore.rank.sums import NEUTRAL, combine_metrics, combine_steps, reduce_metrics

FOLDS = {
    MetricKind.TOKENS: sum,
    MetricKind.SEQUENCES: sum,
    MetricKind.NONE: sum,
    MetricKind.MIN: min,
    MetricKind.MAX: max,
}


def combine(parts):
    return combine_metrics([{"loss": part} for part in parts])["loss"]


def metric(value, kind=MetricKind.TOKENS):
    return MetricSum(torch.tensor(value), kind)


@given(st.sampled_from(list(MetricKind)), st.lists(st.integers(-1000, 1000), min_size=1, max_size=6))
def test_each_kind_folds_its_own_way(kind, values):
    found = combine([metric(float(value), kind) for value in values])
    assert found.value.item() == FOLDS[kind](values)
    assert found.kind is kind


@given(st.sampled_from(list(MetricKind)), st.lists(st.integers(-99, 99), min_size=2, max_size=6), st.data())
def test_the_grouping_of_parts_does_not_matter(kind, values, data):
    parts = [metric(float(value), kind) for value in values]
    cut = data.draw(st.integers(1, len(parts) - 1))
    assert combine([combine(parts[:cut]), combine(parts[cut:])]) == combine(parts)


def test_parts_of_several_kinds_are_refused():
    with pytest.raises(ValueError, match="one kind"):
        combine([metric(1.0), metric(1.0, MetricKind.MIN)])


def test_many_small_sums_do_not_lose_what_fp32_would():
    parts = [metric(2.0**24)] + [metric(1.0)] * 7
    assert combine(parts).value.item() == 2**24 + 7


def test_microbatches_combine_by_name_and_may_lack_a_metric():
    combined = combine_metrics(
        [
            {"loss": metric(1.0), "low": metric(3.0, MetricKind.MIN)},
            {"loss": metric(4.0), "low": metric(-1.0, MetricKind.MIN), "extra": metric(7.0, MetricKind.NONE)},
        ]
    )
    assert {name: (m.value.item(), m.kind) for name, m in combined.items()} == {
        "loss": (5, MetricKind.TOKENS),
        "low": (-1, MetricKind.MIN),
        "extra": (7, MetricKind.NONE),
    }


def rank_metrics(rank):
    """Metrics of one rank, in an order of its own."""
    entries = {
        "loss": (1.5 * (rank + 1), MetricKind.TOKENS),
        "row": (2.0 + rank, MetricKind.SEQUENCES),
        "count": (10.0, MetricKind.NONE),
        "low": (0.5 - rank, MetricKind.MIN),
        "high": (0.25 + rank, MetricKind.MAX),
        "other high": (9.0 - rank, MetricKind.MAX),
    }
    names = list(entries)
    random.Random(rank).shuffle(names)
    return {name: MetricSum(torch.tensor(entries[name][0]), entries[name][1]) for name in names}


def gathered(ranks):
    """A collective over ranks that run one after the other: what each would send, in rank order."""
    sent = []

    def collect(numbers):
        sent.append(numbers)
        return numbers[None]

    for rank in range(ranks):
        reduce_metrics(rank_metrics(rank), collect)
    return lambda _numbers: torch.stack(sent)


def test_ranks_combine_by_kind():
    reduced = reduce_metrics(rank_metrics(0), gathered(ranks=3))
    assert {name: (m.value.item(), m.kind) for name, m in reduced.items()} == {
        "loss": (9, MetricKind.TOKENS),
        "row": (9, MetricKind.SEQUENCES),
        "count": (30, MetricKind.NONE),
        "low": (-1.5, MetricKind.MIN),
        "high": (2.25, MetricKind.MAX),
        "other high": (9, MetricKind.MAX),
    }
    assert list(reduced) == list(rank_metrics(0))


def test_all_kinds_share_one_collective_and_no_metric_needs_none():
    sent = []

    def gather(numbers):
        sent.append(numbers)
        return numbers[None]

    reduce_metrics(rank_metrics(0), gather)
    assert reduce_metrics({}, gather) == {}
    assert [(one.shape, one.dtype) for one in sent] == [((6,), torch.float64)]


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (MetricKind.TOKENS, (2 * 30 + 6 * 10) / 40),
        (MetricKind.SEQUENCES, (2 * 1 + 6 * 3) / 4),
        (MetricKind.NONE, 8.0),
        (MetricKind.MIN, 2.0),
        (MetricKind.MAX, 6.0),
    ],
)
def test_steps_combine_as_if_they_had_been_one(kind, wanted):
    assert combine_steps(kind, [2.0, 6.0], [1, 3], [30, 10]) == wanted
    # A step without a valid token adds nothing, whatever it reports.
    neutral = NEUTRAL[kind]
    assert combine_steps(kind, [2.0, neutral, 6.0], [1, 0, 3], [30, 0, 10]) == wanted
    assert combine_steps(kind, [neutral], [0], [0]) == neutral
