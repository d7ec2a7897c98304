import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_mcore.losses.base import MetricKind, MetricSum
from nemo_rl_mcore.training.normalization import combine, combine_metrics, normalize_metrics

FOLDS = {
    MetricKind.TOKENS: sum,
    MetricKind.SEQUENCES: sum,
    MetricKind.NONE: sum,
    MetricKind.MIN: min,
    MetricKind.MAX: max,
}


def metric(value: float, kind: MetricKind = MetricKind.TOKENS) -> MetricSum:
    return MetricSum(torch.tensor(value), kind)


@given(st.sampled_from(list(MetricKind)), st.lists(st.integers(-1000, 1000), min_size=1, max_size=6))
def test_each_kind_folds_its_own_way(kind: MetricKind, values: list[int]):
    found = combine([metric(float(value), kind) for value in values])
    assert found.value.item() == FOLDS[kind](values)
    assert found.kind is kind


@given(st.sampled_from(list(MetricKind)), st.lists(st.integers(-99, 99), min_size=2, max_size=6), st.data())
def test_the_grouping_of_parts_does_not_matter(kind: MetricKind, values: list[int], data: st.DataObject):
    parts = [metric(float(value), kind) for value in values]
    cut = data.draw(st.integers(1, len(parts) - 1))
    assert combine([combine(parts[:cut]), combine(parts[cut:])]) == combine(parts)


def test_extrema_of_nothing_vanish():
    assert combine([metric(math.inf, MetricKind.MIN), metric(2.0, MetricKind.MIN)]).value.item() == 2
    assert combine([metric(-math.inf, MetricKind.MAX), metric(2.0, MetricKind.MAX)]).value.item() == 2


@pytest.mark.parametrize("parts", [[], [metric(1.0), metric(1.0, MetricKind.MIN)]])
def test_parts_without_one_common_kind_are_refused(parts: list[MetricSum]):
    with pytest.raises(ValueError, match="one kind"):
        combine(parts)


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


def test_combining_does_not_wait_for_the_device():
    part = {"loss": MetricSum(torch.zeros((), device="meta"), MetricKind.MIN)}
    assert combine_metrics([part, part])["loss"].value.device.type == "meta"


def test_the_whole_is_divided_by_the_count_of_each_kind():
    found = normalize_metrics({kind.value: metric(12.0, kind) for kind in MetricKind}, 3, torch.tensor(6.0))
    values = {name: value.item() for name, value in found.items()}
    assert values == {"tokens": 2, "sequences": 4, "none": 12, "min": 12, "max": 12}


def test_the_mean_of_nothing_is_zero():
    assert normalize_metrics({"loss": metric(0.0)}, 0, 0)["loss"].item() == 0
