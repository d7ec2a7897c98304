from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import assert_refused, refused

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.microbatch import (
    DynamicRows,
    FixedRows,
    PackedRows,
    TokenBudget,
    balanced,
    first_fit_decreasing,
    in_batch_order,
    split_balanced,
)
from nemo_rl_mcore.data.validation import BatchCheck, BatchError
from nemo_rl_mcore.losses import DPOLossFn, NLLLossFn
from nemo_rl_mcore.rank.train_step import BatchSizes
from nemo_rl_mcore.recipe.load import load_config

COLUMNS = 7


def batch(lengths, columns=COLUMNS):
    """Rows whose tokens are all different and none is 0."""
    rows = len(lengths)
    real = torch.arange(columns) < torch.tensor(lengths, dtype=torch.long).view(rows, 1)
    return BatchedDataDict(
        input_ids=torch.arange(1, rows * columns + 1).view(rows, columns) * real,
        input_lengths=torch.tensor(lengths, dtype=torch.long),
        token_mask=real.float(),
        topk=real.unsqueeze(2) * torch.arange(1, rows * columns * 3 + 1).view(rows, columns, 3),
        sample_mask=torch.ones(rows),
        texts=[str(row) for row in range(rows)],
    )


def made(cut, data, empty=0):
    return cut.build(data, cut.groups(data) + [[]] * empty)


@pytest.mark.parametrize("rows", [0, 1, 4, 6, 7])
@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_fixed_microbatches_have_one_shape(rows, multiple):
    parts = made(FixedRows(3, multiple), batch([5] * rows, columns=5), empty=1)
    columns = -(-5 // multiple) * multiple
    assert len(parts) == -(-rows // 3) + 1
    assert {tuple(part.rows["input_ids"].shape) for part in parts} == {(3, columns)}
    assert {tuple(part.rows["topk"].shape) for part in parts} == {(3, columns, 3)}
    together = torch.cat([part.rows["input_ids"] for part in parts])
    assert torch.equal(together[:rows, :5], batch([5] * rows, columns=5)["input_ids"])
    assert together[rows:].abs().sum() == 0


lengths_of_rows = st.lists(st.integers(0, COLUMNS), max_size=20)
cuts = st.one_of(
    st.builds(FixedRows, st.integers(1, 5), st.sampled_from([1, 2, 4])),
    *(
        st.builds(
            way,
            st.builds(
                TokenBudget, st.integers(COLUMNS, 4 * COLUMNS), st.integers(1, 5), st.sampled_from([1, 2, 4])
            ),
        )
        for way in (DynamicRows, PackedRows, lambda budget: PackedRows(budget, equal_columns=True))
    ),
)


@given(cuts, lengths_of_rows, st.integers(1, 2))
def test_every_cut_holds_every_row_once_and_gives_it_back_in_its_place(cut, lengths, empty):
    data = batch(lengths)
    parts = made(cut, data, empty)
    places = [place for part in parts for place in part.places.tolist()]
    assert sorted(places) == list(range(len(lengths)))
    assert sum(part.rows["sample_mask"].sum() for part in parts) == len(lengths)
    assert sum(part.rows["token_mask"].sum() for part in parts) == sum(lengths)
    assert all("texts" not in part.rows for part in parts)
    for name in ("input_ids", "topk"):
        seen = [(part.places, part.from_model(part.to_model(part.rows[name]))) for part in parts]
        assert torch.equal(in_batch_order(seen, len(lengths), COLUMNS), data[name])


@given(cuts, lengths_of_rows)
def test_empty_groups_are_filling_that_counts_nothing(cut, lengths):
    *_, filling = made(cut, batch(lengths), empty=1)
    assert len(filling.places) == 0
    assert all(value.abs().sum() == 0 for value in filling.rows.values())
    assert filling.input_ids.numel() > 0


def test_values_behind_the_columns_of_a_microbatch_come_back_as_zeros():
    parts = [(torch.tensor([2]), torch.ones(1, 2)), (torch.tensor([0, 1]), torch.full((3, 5), 2.0))]
    assert in_batch_order(parts, 3, 4).tolist() == [[2, 2, 2, 2], [2, 2, 2, 2], [1, 1, 0, 0]]


@given(
    st.lists(st.integers(0, COLUMNS), min_size=1, max_size=20), st.integers(COLUMNS, 40), st.integers(1, 5)
)
def test_padded_tokens_stay_within_the_budget(lengths, tokens, length_round):
    for part in made(DynamicRows(TokenBudget(tokens, length_round)), batch(lengths)):
        rows, columns = part.rows["input_ids"].shape
        longest = max(lengths[place] for place in part.places)
        assert rows == len(part.places)
        assert rows * columns <= tokens
        assert longest <= columns <= max(COLUMNS, 1)
        assert columns - max(longest, 1) < length_round


@pytest.mark.parametrize(
    ("cut", "lengths", "groups"),
    [
        (DynamicRows(TokenBudget(14)), [2, 7, 3, 6, 2, 2], [[1, 3], [2, 0, 4, 5]]),  # the longest first
        # Pairs go where their longer rows go, of 4, 7, 3 tokens.
        (DynamicRows(TokenBudget(16), rows_per_sample=2), [4, 1, 2, 7, 3, 3], [[2, 3], [0, 1, 4, 5]]),
        # A pair above the budget is a microbatch of its own.
        (DynamicRows(TokenBudget(8), rows_per_sample=2), [7, 7, 2, 1, 1, 2], [[0, 1], [2, 3, 4, 5]]),
        # Tokens of the pairs: 9, 10, 5.
        (PackedRows(TokenBudget(15), rows_per_sample=2), [7, 2, 3, 7, 2, 3], [[2, 3, 4, 5], [0, 1]]),
    ],
)
def test_rows_of_like_length_go_together_and_pairs_whole(cut, lengths, groups):
    assert cut.groups(batch(lengths)) == groups


def test_a_layout_may_pad_a_row_beyond_the_budget_but_never_adds_another_row_to_it():
    parts = made(DynamicRows(TokenBudget(7, column_multiple=4)), batch([7, 4, 3]))
    assert [tuple(part.rows["input_ids"].shape) for part in parts] == [(1, 8), (1, 4), (1, 4)]


@pytest.mark.parametrize("cut", [DynamicRows, PackedRows])
def test_filling_is_a_whole_sample(cut):
    parts = made(cut(TokenBudget(20), rows_per_sample=2), batch([4, 1]), empty=1)
    assert [part.rows.size for part in parts] == [2, 2]
    assert not parts[1].rows["sample_mask"].any()


@given(
    st.integers(2, 4), st.lists(st.integers(0, COLUMNS), min_size=1, max_size=20), st.integers(COLUMNS, 60)
)
def test_no_sample_is_parted(size, lengths, tokens):
    whole = lengths * size
    for group in DynamicRows(TokenBudget(tokens), rows_per_sample=size).groups(batch(whole)):
        for first in range(0, len(group), size):
            assert group[first] % size == 0
            assert group[first : first + size] == list(range(group[first], group[first] + size))


CAPACITY = 20


@given(st.lists(st.integers(0, CAPACITY), max_size=60))
def test_bins_hold_every_index_once_within_the_capacity(lengths):
    bins = first_fit_decreasing(lengths, CAPACITY)
    assert sorted(index for group in bins for index in group) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in group) <= CAPACITY for group in bins)


@given(st.lists(st.integers(1, CAPACITY), max_size=60))
def test_no_two_bins_fit_into_one(lengths):
    filled = sorted(
        sum(lengths[index] for index in group) for group in first_fit_decreasing(lengths, CAPACITY)
    )
    assert all(first + second > CAPACITY for first, second in pairwise(filled))


def test_each_goes_into_the_first_bin_with_room():
    # 9 and 8 begin bins, 6 fits neither, 2 fits the second, 1 the first.
    assert first_fit_decreasing([1, 6, 9, 2, 8], 10) == [[2, 0], [4, 3], [1]]


def test_a_length_above_the_capacity_is_refused():
    with refused("capacity", 11, 10):
        first_fit_decreasing([3, 11], 10)


def packs(tokens=14, **options):
    return PackedRows(TokenBudget(tokens, **options))


def test_a_packed_row_is_its_samples_without_padding():
    packed, *more = made(packs(length_round=4), batch([3, 0, 4, 2]))
    assert not more
    assert packed.places.tolist() == [2, 0, 3, 1]
    assert packed.input_ids.tolist() == [[15, 16, 17, 18, 1, 2, 3, 22, 23, 0, 0, 0]]
    assert packed.padding.tolist() == [[False] * 9 + [True] * 3]
    # A sample without tokens has no borders of its own; the padding stands alone.
    assert packed.borders == (0, 4, 7, 9, 12)
    assert packed.rows["input_ids"].shape == (4, 4)


def test_a_full_row_has_no_padding():
    packed = made(packs(7), batch([3, 4]))[0]
    assert packed.borders == (0, 4, 7)
    assert packed.input_ids.shape == (1, 7)


@given(st.lists(st.integers(0, COLUMNS), min_size=1, max_size=12), st.integers(COLUMNS, 30))
def test_gradients_reach_the_tokens_they_come_from(lengths, tokens):
    for part in made(packs(tokens, length_round=3), batch(lengths)):
        length = part.input_ids.shape[1]
        assert length <= tokens
        for more in ((), (2,)):
            values = torch.randn(1, length, *more, requires_grad=True)
            weights = torch.randn(*part.rows["input_ids"].shape, *more)
            (part.from_model(values) * weights).sum().backward()
            real = part.to_model(part.rows["token_mask"]).view(1, length, *[1 for _ in more])
            assert torch.equal(values.grad, part.to_model(weights) * real)


def test_pipelines_get_rows_of_one_length():
    cut = PackedRows(TokenBudget(8, length_round=2), equal_columns=True)
    parts = made(cut, batch([7, 3, 2]), empty=1)
    assert {part.input_ids.shape for part in parts} == {(1, 8)}
    assert parts[-1].borders == (0, 8)


def test_a_pair_above_the_budget_raises_the_budget_of_its_batch():
    cut = PackedRows(TokenBudget(8), rows_per_sample=2)
    packed = made(cut, batch([7, 6, 2, 1, 3, 4]))
    assert [part.places.tolist() for part in packed] == [[0, 1], [4, 5, 2, 3]]
    assert [part.input_ids.shape[1] for part in packed] == [13, 10]


def test_rows_of_a_packed_row_are_padded_one_by_one():
    packed = made(PackedRows(TokenBudget(16, column_multiple=4), row_multiple=4), batch([3, 0, 4, 5]))[0]
    assert packed.places.tolist() == [3, 0, 2, 1]
    assert packed.borders == (0, 8, 12, 16)
    real = [True] * 5 + [False] * 3 + [True] * 3 + [False] + [True] * 4
    assert packed.padding.tolist() == [[not one for one in real]]


@pytest.mark.parametrize(
    ("length", "at_most", "padded"),
    [(1, None, 8), (8, None, 8), (9, None, 16), (17, None, 20), (0, None, 8), (9, 10, 12), (3, 3, 4)],
)
def test_padding_stops_at_the_budget_and_is_cut_evenly(length, at_most, padded):
    assert TokenBudget(20, length_round=8, column_multiple=4).padded(length, at_most=at_most) == padded


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


# Five episodes, of 2, 1, 3, 1 and 1 rows.
NUMBERS, LENGTHS = [3, 3, 0, 7, 7, 7, 1, 5], [4, 6, 2, 3, 5, 7, 0, 6]
EPISODES = [[0, 1], [2], [3, 4, 5], [6], [7]]


def episodes(numbers=NUMBERS, lengths=LENGTHS):
    data = batch(lengths)
    data["episode_index"], data["row"] = torch.tensor(numbers), torch.arange(len(numbers))
    return data


def rows(data):
    return data["row"].tolist()


def test_the_rows_of_an_episode_are_a_sample():
    assert [[*sample] for sample in episodes().samples()] == EPISODES
    assert episodes().slice(0, 0).samples() == []


def test_samples_of_several_rows_are_not_read_out_of_episodes():
    with refused("rows-per-sample", "episode_index", 2):
        episodes().samples(2)


def test_the_rows_of_an_episode_stand_together():
    with refused("episode-apart", "episode_index"):
        episodes([3, 3, 0, 3, 7, 7, 1, 5]).samples()


def test_batches_that_are_joined_keep_their_episodes_apart():
    one = BatchedDataDict(episode_index=torch.tensor([4, 4, 2]))
    joined = BatchedDataDict.from_batches([one, one.slice(0, 0), one.slice(2, 3), one])
    assert [[*sample] for sample in joined.samples()] == [[0, 1], [2], [3], [4, 5], [6]]


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("split", [BatchedDataDict.split, split_balanced])
def test_a_data_parallel_rank_has_whole_episodes(split, shards):
    parts = [
        [[*part["row"][torch.tensor(sample)].tolist()] for sample in part.samples()]
        for part in split(episodes(), shards)
    ]
    assert sorted(sample for part in parts for sample in part) == EPISODES
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_equal_shards_have_equally_many_episodes():
    data = episodes().slice(0, 7)
    assert [rows(shard) for shard in data.shard_by_batch_size(2)] == [[0, 1, 2], [3, 4, 5, 6]]
    assert [rows(shard) for shard in data.shard_by_batch_size(2, 2)] == [[0, 1, 3, 4, 5], [2, 6]]
    with refused("equal-shards", 5, 2):
        episodes().shard_by_batch_size(2)
    with refused("equal-batches", 5, 2):
        episodes().shard_by_batch_size(2, 2)


WAYS = {
    "rows": FixedRows(2),
    "dynamic": DynamicRows(TokenBudget(14)),
    "dynamic, below an episode": DynamicRows(TokenBudget(7)),
    "packing": PackedRows(TokenBudget(14)),
    "packing, below an episode": PackedRows(TokenBudget(7)),
}


@pytest.mark.parametrize("way", WAYS)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6), data=st.data())
def test_no_microbatch_parts_an_episode(way, sizes, data):
    numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=len(numbers), max_size=len(numbers)))
    found = [part.places.tolist() for part in made(WAYS[way], episodes(numbers, lengths))]
    assert sorted(place for part in found for place in part) == [*range(len(numbers))]
    for part in found:
        for number in {numbers[place] for place in part}:
            at = [index for index, place in enumerate(part) if numbers[place] == number]
            assert len(at) == sizes[number]
            assert at == [*range(at[0], at[0] + len(at))]


def test_a_fixed_number_of_rows_grows_to_the_longest_episode():
    parts = made(FixedRows(2), episodes())
    assert [part.places.tolist() for part in parts] == [[0, 1], [2], [3, 4, 5], [6, 7]]
    assert {part.rows["input_ids"].shape[0] for part in parts} == {3}


def sizes(loss_fn=None, **given):
    policy = load_config("examples/configs/dpo_cpu.yaml").policy
    return BatchSizes.of(policy, loss_fn or NLLLossFn(), given.get("gbs", 2), 1)


def test_a_step_takes_as_many_episodes_as_a_recipe_says_samples():
    data = episodes().slice(0, 7)
    assert [rows(step) for step in sizes().steps(data)] == [[0, 1, 2], [3, 4, 5, 6]]
    assert [rows(step) for step in sizes().steps(data, 2)] == [[0, 1], [2], [3, 4, 5], [6]]
    with refused("rows-per-step", 5, 2):
        sizes().steps(episodes())


CHECK = partial(BatchCheck(vocab_size=100, positions=8).training, columns=())


def test_a_batch_of_episodes_passes():
    data = episodes()
    data["sample_mask"][:2] = 0
    CHECK(data)


@pytest.mark.parametrize(
    ("key", "values", "code", "of"),
    [
        ("episode_index", [3, 3, 0, 7, 7, 3, 1, 5], "episode-apart", [3, 5]),
        ("episode_index", [[3]] * 8, "shape", [[8, 1], [8]]),
        ("episode_index", [0.5] * 8, "dtype", ["float32", "int64"]),
        ("sample_mask", [1.0, 1, 1, 1, 0, 1, 1, 1], "episode-mask", [0.0, 4, 5]),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_one_episode_are_refused(key, values, code, of):
    with refused("batch", by=BatchError) as caught:
        CHECK(BatchedDataDict(episodes(), **{key: torch.tensor(values)}))
    (found,) = caught.value.findings
    assert found.key == key
    assert_refused(found, code, *of)


def test_a_loss_of_pairs_takes_no_episodes():
    with refused("batch", "episode_index", 2):
        CHECK(episodes(), rows_per_sample=DPOLossFn({}).rows_per_sample)
