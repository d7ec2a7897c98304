import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from uneven_batch import COLUMNS, batch, made

from nemo_rl_mcore.data.microbatch import DynamicRows, FixedRows, PackedRows, TokenBudget, in_batch_order


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
                TokenBudget,
                st.integers(COLUMNS, 4 * COLUMNS),
                st.integers(1, 5),
                st.sampled_from([1, 2, 4]),
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
def test_cuts_are_deterministic(cut, lengths):
    assert cut.groups(batch(lengths)) == cut.groups(batch(lengths))


@given(cuts, lengths_of_rows)
def test_empty_groups_are_filling_that_counts_nothing(cut, lengths):
    *_, filling = made(cut, batch(lengths), empty=1)
    assert len(filling.places) == 0
    assert all(value.abs().sum() == 0 for value in filling.rows.values())
    assert filling.input_ids.numel() > 0


def test_values_behind_the_columns_of_a_microbatch_come_back_as_zeros():
    parts = [(torch.tensor([2]), torch.ones(1, 2)), (torch.tensor([0, 1]), torch.full((3, 5), 2.0))]
    assert in_batch_order(parts, 3, 4).tolist() == [[2, 2, 2, 2], [2, 2, 2, 2], [1, 1, 0, 0]]
