import math
import random

import pytest
import torch

from nemo_rl_mcore.losses.base import MetricKind, MetricSum
from nemo_rl_mcore.training.metrics import (
    ReduceKind,
    combine_steps,
    finalize_metrics,
    neutral_value,
    reduce_metrics,
)


def rank_metrics(rank: int) -> dict[str, MetricSum]:
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


class Exchange:
    """A collective over ranks that run one after the other: first all tensors are collected, then reduced."""

    def __init__(self, ranks: int) -> None:
        self.sent: list[list[tuple[ReduceKind, torch.Tensor]]] = []
        for rank in range(ranks):
            calls: list[tuple[ReduceKind, torch.Tensor]] = []
            reduce_metrics(rank_metrics(rank), lambda t, kind, calls=calls: calls.append((kind, t.clone())))
            self.sent.append(calls)
        self.step = 0

    def all_reduce(self, tensor: torch.Tensor, kind: ReduceKind) -> None:
        calls = [sent[self.step] for sent in self.sent]
        assert {sent_kind for sent_kind, _ in calls} == {kind}
        stacked = torch.stack([sent for _, sent in calls])
        fold = {
            ReduceKind.SUM: stacked.sum(0),
            ReduceKind.MIN: stacked.amin(0),
            ReduceKind.MAX: stacked.amax(0),
        }
        tensor.copy_(fold[kind])
        self.step += 1


def test_ranks_combine_by_kind_in_at_most_three_collectives():
    exchange = Exchange(ranks=3)
    reduced = reduce_metrics(rank_metrics(0), exchange.all_reduce)
    assert exchange.step == 3
    assert {name: (m.value.item(), m.kind) for name, m in reduced.items()} == {
        "loss": (9, MetricKind.TOKENS),
        "row": (9, MetricKind.SEQUENCES),
        "count": (30, MetricKind.NONE),
        "low": (-1.5, MetricKind.MIN),
        "high": (2.25, MetricKind.MAX),
        "other high": (9, MetricKind.MAX),
    }
    assert list(reduced) == list(rank_metrics(0))


def test_a_kind_that_does_not_occur_needs_no_collective():
    kinds: list[ReduceKind] = []
    sums = {"loss": rank_metrics(0)["loss"], "count": rank_metrics(0)["count"]}
    reduce_metrics(sums, lambda tensor, kind: kinds.append(kind))
    assert kinds == [ReduceKind.SUM]
    assert reduce_metrics({}, lambda tensor, kind: kinds.append(kind)) == {}
    assert len(kinds) == 1


def test_reducing_leaves_the_local_sums_alone_and_packs_fp64():
    sums = rank_metrics(0)

    def double(tensor: torch.Tensor, kind: ReduceKind) -> None:
        assert tensor.dtype is torch.float64
        assert tensor.ndim == 1
        tensor.mul_(2)

    assert reduce_metrics(sums, double)["loss"].value.item() == 3
    assert sums["loss"].value.item() == 1.5


def test_the_report_is_divided_once():
    assert finalize_metrics(rank_metrics(0), 4, 3) == pytest.approx(
        {"loss": 0.5, "row": 0.5, "count": 10, "low": 0.5, "high": 0.25, "other high": 9}
    )


def test_extrema_of_nothing_are_the_values_that_change_nothing():
    sums = {
        "low": MetricSum(torch.tensor(math.inf), MetricKind.MIN),
        "high": MetricSum(torch.tensor(-math.inf), MetricKind.MAX),
    }
    assert finalize_metrics(sums, 1, 1) == {name: neutral_value(metric.kind) for name, metric in sums.items()}


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
    neutral = neutral_value(kind)
    assert combine_steps(kind, [2.0, neutral, 6.0], [1, 0, 3], [30, 0, 10]) == wanted
    assert combine_steps(kind, [neutral], [0], [0]) == neutral
