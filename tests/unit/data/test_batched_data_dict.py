import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.errors import RefusedError


def batch(rows: int = 6, columns: int = 4) -> BatchedDataDict:
    return BatchedDataDict(
        input_ids=torch.arange(rows * columns).reshape(rows, columns),
        sample_mask=torch.arange(rows, dtype=torch.float32),
        topk=torch.arange(rows * columns * 2).reshape(rows, columns, 2),
        text=[f"row {i}" for i in range(rows)],
    )


def row_numbers(data: BatchedDataDict) -> list[int]:
    """Which rows of `batch()` these are; every entry must agree."""
    numbers = [int(x) for x in data["sample_mask"]]
    width = data["input_ids"].shape[1]
    assert data["input_ids"][:, 0].tolist() == [n * width for n in numbers]
    assert data["topk"][:, 0, 0].tolist() == [n * width * 2 for n in numbers]
    assert data["text"] == [f"row {n}" for n in numbers]
    return numbers


def same(a: BatchedDataDict, b: BatchedDataDict) -> bool:
    return list(a) == list(b) and all(
        torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a
    )


def test_it_is_a_dict_and_gives_a_plain_one():
    data = batch()
    plain = data.get_dict()
    assert type(plain) is dict
    assert plain.keys() == data.keys()
    assert plain["input_ids"] is data["input_ids"]
    plain["other"] = 1
    assert "other" not in data


@pytest.mark.parametrize(
    "assign",
    [
        lambda d: d.__setitem__("odd", torch.zeros(5)),
        lambda d: d.update({"odd": [1] * 5}),
        lambda d: d.update(odd=torch.zeros(5, 2)),
        lambda d: d.setdefault("odd", torch.zeros(5)),
        lambda d: d.__ior__({"odd": torch.zeros(5)}),
        lambda d: BatchedDataDict(d, odd=torch.zeros(5)),
        lambda d: BatchedDataDict([*d.items(), ("odd", torch.zeros(5))]),
    ],
)
def test_rows_that_disagree_are_refused_by_key(assign: Any):
    data = batch()
    with refused("row-counts", "'odd'", 5, "'input_ids'", 6):
        assign(data)
    assert "odd" not in data


@pytest.mark.parametrize("value", [torch.tensor(1.0), 3, "text", None, (1, 2, 3, 4, 5, 6)])
def test_a_value_without_rows_is_refused_by_key(value: Any):
    with refused("no-column", "'odd'"):
        batch()["odd"] = value


def test_good_assignments_take_every_road():
    data = batch()
    data["a"] = torch.zeros(6)
    data.update({"b": [0] * 6}, c=torch.zeros(6, 1))
    assert data.setdefault("a", torch.ones(6)).sum() == 0
    data |= {"d": torch.zeros(6)}
    assert isinstance(data, BatchedDataDict)
    assert {"a", "b", "c", "d"} <= data.keys()
    lone = BatchedDataDict(x=torch.zeros(3))
    lone["x"] = torch.zeros(5)
    assert lone.size == 5


def test_copies_and_pickles_are_batches_of_their_own():
    data = batch()
    for twin in (data.copy(), copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert isinstance(twin, BatchedDataDict)
        assert same(twin, data)
        twin["other"] = torch.zeros(6)
        assert "other" not in data


def test_to_moves_tensors_and_leaves_the_original():
    data = batch()
    moved = data.to("meta")
    assert {value.device.type for value in moved.values() if isinstance(value, torch.Tensor)} == {"meta"}
    assert moved["text"] == data["text"]
    assert data["input_ids"].device.type == "cpu"


@given(st.integers(-1, 7), st.integers(-1, 7))
def test_slice_takes_consecutive_rows(start: int, end: int):
    if 0 <= start <= end <= 6:
        assert row_numbers(batch().slice(start, end)) == list(range(start, end))
    else:
        with refused("slice", start, end, 6):
            batch().slice(start, end)


@given(st.lists(st.integers(0, 5), max_size=9))
def test_select_indices_takes_rows_in_that_order(indices: list[int]):
    assert row_numbers(batch().select_indices(indices)) == indices
    assert row_numbers(batch().select_indices(torch.tensor(indices, dtype=torch.int32))) == indices


def test_a_mask_is_not_row_numbers():
    with pytest.raises(ValueError, match="nonzero"):
        batch().select_indices(torch.tensor([True, False, True, True, True, True]))


@given(st.integers(0, 4))
def test_repeat_interleave_keeps_copies_together(repeats: int):
    assert row_numbers(batch(3).repeat_interleave(repeats)) == [i for i in range(3) for _ in range(repeats)]


@given(st.integers(0, 4), st.integers(1, 4))
def test_shards_are_equal_consecutive_and_complete(per_shard: int, shards: int):
    parts = batch(per_shard * shards).shard_by_batch_size(shards)
    assert [part.size for part in parts] == [per_shard] * shards
    assert [n for part in parts for n in row_numbers(part)] == list(range(per_shard * shards))


def test_each_step_of_several_is_sharded_on_its_own():
    parts = batch(8).shard_by_batch_size(2, batch_size=4)
    assert [row_numbers(part) for part in parts] == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize(("shards", "batch_size"), [(4, None), (0, None), (2, 3), (2, 4), (-1, None)])
def test_shards_with_a_remainder_are_refused(shards: int, batch_size: int | None):
    with pytest.raises(RefusedError) as caught:
        batch(6).shard_by_batch_size(shards, batch_size)
    assert caught.value.code in ("equal-shards", "equal-batches")


def test_from_batches_joins_rows_and_pads_columns_on_the_right():
    short = BatchedDataDict(
        input_ids=torch.tensor([[1, 2]]), topk=torch.ones(1, 2, 3), x=torch.tensor([1]), t=["a"]
    )
    long = BatchedDataDict(
        input_ids=torch.tensor([[3, 4, 5], [6, 7, 8]]),
        topk=torch.ones(2, 3, 3),
        x=torch.tensor([2, 3]),
        t=["b", "c"],
    )
    joined = BatchedDataDict.from_batches([short, long], pad_value_dict={"input_ids": 9})
    assert joined["input_ids"].tolist() == [[1, 2, 9], [3, 4, 5], [6, 7, 8]]
    assert joined["topk"].shape == (3, 3, 3)
    assert joined["topk"][0].sum(dim=-1).tolist() == [3, 3, 0]
    assert joined["x"].tolist() == [1, 2, 3]
    assert joined["t"] == ["a", "b", "c"]
    assert joined["input_ids"].dtype is torch.int64


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": torch.zeros(1, 2, 5), "z": [1]}, r"'x' has shapes"),
        ({"x": torch.zeros(1, 2), "z": [1]}, r"'x' has shapes"),
        ({"x": torch.zeros(1, 2, 3)}, r"'z' is missing from batches \[1\] of 2"),
        ({"x": torch.zeros(1, 2, 3), "z": [1], "y": [1]}, r"'y' is missing from batches \[0\] of 2"),
        ({"x": torch.zeros(1, 2, 3), "z": torch.zeros(1)}, r"'z' is a tensor in some batches"),
    ],
)
def test_batches_that_do_not_fit_are_refused_by_key_and_none_at_all(other: dict[str, Any], message: str):
    with refused("no-batch"):
        BatchedDataDict.from_batches([])
    with pytest.raises(ValueError, match=message):
        BatchedDataDict.from_batches([{"x": torch.zeros(1, 2, 3), "z": [1]}, other])


@pytest.mark.stage("processes")
def test_the_package_gives_the_batch_on_demand_and_nothing_else():
    code = (
        "import sys, nemo_rl_mcore.data as data\n"
        "assert 'torch' not in sys.modules\n"
        "assert data.BatchedDataDict.__name__ == 'BatchedDataDict'\n"
        "assert not hasattr(data, 'BatchedDatadict')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("rows", "shards", "sizes"), [(7, 2, [3, 4]), (1, 3, [0, 0, 1]), (0, 2, [0, 0])])
def test_deal_is_as_even_as_can_be_and_drops_nothing(rows, shards, sizes):
    data = batch(8).slice(0, rows)
    parts = data.split(shards)
    assert sorted(part.size for part in parts) == sizes
    assert same(BatchedDataDict.from_batches(parts), data)


def test_neither_a_deal_nor_shards_part_a_sample():
    data = BatchedDataDict(row=torch.arange(12))
    parts = data.split(4, rows_per_sample=2)
    assert [part["row"].tolist() for part in parts] == [[0, 1], [2, 3, 4, 5], [6, 7], [8, 9, 10, 11]]
    shards = data.shard_by_batch_size(3, rows_per_sample=2)
    assert [shard["row"].tolist() for shard in shards] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    with refused("rows-per-sample", 11, 2):
        data.slice(0, 11).split(4, rows_per_sample=2)
    with refused("equal-shards", 12, 2, 4):
        data.shard_by_batch_size(4, rows_per_sample=2)
