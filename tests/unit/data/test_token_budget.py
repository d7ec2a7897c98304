import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from uneven_batch import batch

from nemo_rl_mcore.data.microbatch import TokenBudget, balanced, split_balanced


@pytest.mark.parametrize(
    ("length", "at_most", "padded"),
    [(1, None, 8), (8, None, 8), (9, None, 16), (17, None, 20), (0, None, 8), (9, 10, 12), (3, 3, 4)],
)
def test_padding_stops_at_the_budget_and_is_cut_evenly(length, at_most, padded):
    assert TokenBudget(20, length_round=8, column_multiple=4).padded(length, at_most=at_most) == padded


@given(st.integers(1, 4), st.lists(st.integers(1, 50), max_size=24))
def test_balancing_keeps_every_sample_once_and_the_shards_as_even_as_can_be(shards: int, lengths: list[int]):
    shares = balanced(lengths, shards)
    assert sorted(sample for shard in shares for sample in shard) == list(range(len(lengths)))
    sizes = [len(shard) for shard in shares]
    assert max(sizes) - min(sizes) == (1 if len(lengths) % shards else 0)


def test_balancing_spreads_long_samples():
    lengths = [9, 8, 7, 1, 1, 1]
    assert balanced(lengths, 2) == [[0, 3, 4], [1, 2, 5]]  # 11 and 16 tokens; in the batch's order 24 and 3


@given(st.integers(1, 6), st.lists(st.integers(1, 5), max_size=30))
def test_each_sample_goes_to_the_first_of_the_emptiest_shards_with_room(shards: int, lengths: list[int]):
    room = [len(lengths) // shards + (shard < len(lengths) % shards) for shard in range(shards)]
    expected: list[list[int]] = [[] for _ in room]
    for sample in sorted(range(len(lengths)), key=lambda sample: -lengths[sample]):
        with_room = [shard for shard in range(shards) if len(expected[shard]) < room[shard]]
        emptiest = min(with_room, key=lambda shard: sum(lengths[of_shard] for of_shard in expected[shard]))
        expected[emptiest].append(sample)
    assert balanced(lengths, shards) == expected


def test_pairs_are_balanced_whole():
    # Tokens of the pairs: 7, 6, 2, 9.
    data = batch([1, 6, 3, 3, 1, 1, 5, 4])
    shards = split_balanced(data, 2, rows_per_sample=2)
    assert [shard["input_lengths"].tolist() for shard in shards] == [[5, 4, 1, 1], [1, 6, 3, 3]]
    with refused("rows-per-sample", 7, 2):
        split_balanced(data.slice(0, 7), 2, rows_per_sample=2)
