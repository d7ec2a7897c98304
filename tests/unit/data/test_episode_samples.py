"""An episode of several rows is one sample: nothing parts it that cuts a batch, and what cannot be one is refused."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import assert_refused, refused
from uneven_batch import batch, made

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.microbatch import DynamicRows, FixedRows, PackedRows, TokenBudget, split_balanced
from nemo_rl_mcore.data.validation import BatchCheck, BatchError
from nemo_rl_mcore.losses import DPOLossFn, NLLLossFn
from nemo_rl_mcore.rank.train_step import BatchSizes
from nemo_rl_mcore.recipe.load import load_config

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
