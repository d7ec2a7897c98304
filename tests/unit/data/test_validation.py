"""What a model and a loss cannot take is refused by key and row, all of it at once; whatever they can take passes."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import assert_refused, refused

from nemo_rl_mcore.config.policy import TokenBudgets
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.columns import Column, ColumnKind
from nemo_rl_mcore.data.validation import BatchCheck, BatchError

ROWS, COLUMNS, VOCABULARY, CHOICES = 4, 6, 32, 3
CHECK = BatchCheck(VOCABULARY, positions=8)
PACKING = TokenBudgets("policy.sequence_packing", packed=True, train=5, logprob=4, length_round=1)
CHECK_OF_BUDGETS = BatchCheck(VOCABULARY, 8, PACKING)
TEACHER = (
    Column("ids", "the teacher", ColumnKind.TOKEN_IDS, "BSK", of_next_token=True),
    Column("logits", "the teacher", ColumnKind.BELOW_INFINITY, "BSK", of_next_token=True),
    Column("tail", "the teacher", ColumnKind.BELOW_INFINITY, of_next_token=True, optional=True),
)
READ = (
    Column("logprobs", "the ratio"),
    Column("rolled", "the reference", of_next_token=True),
    Column("advantages", "the gradient", ColumnKind.NUMBERS),
    Column("weights", "the mean", shape="B"),
    *TEACHER,
)


def batch(**replaced):
    """Rows of 6, 4, 0 and 5 tokens, the last dropped; None leaves a key out."""
    lengths = torch.tensor([6, 4, 0, 5])
    whole = {
        "input_ids": torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS),
        "input_lengths": lengths,
        "token_mask": (torch.arange(COLUMNS) < lengths.unsqueeze(1)).float(),
        "sample_mask": torch.tensor([1.0, 1.0, 1.0, 0.0]),
        "logprobs": -torch.ones(ROWS, COLUMNS),
        "rolled": -torch.ones(ROWS, COLUMNS),
        "advantages": torch.zeros(ROWS, COLUMNS),
        "weights": torch.ones(ROWS),
        "ids": torch.zeros(ROWS, COLUMNS, CHOICES, dtype=torch.long),
        "logits": torch.zeros(ROWS, COLUMNS, CHOICES),
        "texts": ["a"] * ROWS,
    }
    return BatchedDataDict({key: value for key, value in (whole | replaced).items() if value is not None})


def changed(key, value, *place):
    """The tensor of this key with another value somewhere."""
    tensor = batch()[key].clone()
    tensor[place] = value
    return {key: tensor}


def training(data, check=CHECK, **options):
    check.training(data, READ, **options)


def refusal(call, *args, **options):
    with refused("batch", by=BatchError) as caught:
        call(*args, **options)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [*map(str, caught.value.findings)]
    return caught.value.findings


@pytest.mark.parametrize(
    ("replaced", "code", "of"),
    [
        ({"logprobs": None}, "missing", ["logprobs", "'advantages'"]),
        ({"sample_mask": None}, "missing", ["sample_mask"]),
        ({"token_mask": None}, "missing", ["token_mask"]),
        ({"input_ids": None}, "missing", ["input_ids"]),
        ({"advantages": ["a"] * ROWS}, "no-tensor", ["advantages", "list"]),
        ({"logprobs": torch.zeros(4, 5)}, "shape", ["logprobs", [4, 5], [4, 6]]),
        ({"advantages": torch.zeros(4)}, "shape", ["advantages", [4], [4, 6]]),
        ({"token_mask": torch.zeros(4, 5)}, "shape", ["token_mask", [4, 5], [4, 6]]),
        ({"sample_mask": torch.zeros(4, 1)}, "shape", ["sample_mask", [4, 1], [4]]),
        ({"input_ids": torch.zeros(4)}, "shape", ["input_ids", [4], "[B, S]"]),
        ({"input_lengths": torch.zeros(4, 1)}, "shape", ["input_lengths", [4, 1], [4]]),
        ({"logits": torch.zeros(4, 6, 2)}, "shape", ["logits", [4, 6, 2], [4, 6, 3]]),
        ({"input_ids": torch.zeros(4, 6)}, "dtype", ["input_ids", "float32", "int64"]),
        ({"logprobs": torch.zeros(4, 6).long()}, "dtype", ["logprobs", "int64", "floating"]),
        ({"logprobs": torch.zeros(4, 6).bool()}, "dtype", ["logprobs", "bool", "floating"]),
        ({"ids": torch.zeros(4, 6, 3)}, "dtype", ["ids", "float32", "integers"]),
        (changed("input_ids", 32, 1, 2), "vocabulary", ["input_ids", 32, 1, 0, 31, "model.vocab_size: 32"]),
        (changed("input_ids", -1, 3, 5), "vocabulary", ["input_ids", -1, 3, 0, 31]),
        (changed("input_lengths", 7, 1), "columns", ["input_lengths", 7, 1, 0, 6]),
        (changed("input_lengths", -1, 0), "columns", ["input_lengths", -1, 0, 6]),
        (changed("token_mask", 0.5, 2, 0), "mask", ["token_mask", 0.5, 2]),
        (changed("token_mask", math.nan, 1), "mask", ["token_mask", "nan", 1]),
        (changed("sample_mask", 2.0, 3), "mask", ["sample_mask", 2.0, 3]),
        (changed("logprobs", -math.inf, 0, 1), "finite", ["logprobs", "-inf", 0]),
        (changed("logprobs", math.nan, 1, 3), "finite", ["logprobs", "nan", 1]),
        (changed("rolled", math.inf, 0, 0), "finite", ["rolled", "inf", 0]),
        (changed("weights", math.nan, 2), "finite", ["weights", "nan", 2]),
        (changed("ids", 32, 0, 4, 1), "vocabulary", ["ids", 32, 0, 31]),
        (changed("logits", math.inf, 1, 2, 0), "below-infinity", ["logits", "inf", 1]),
        (changed("logits", math.nan, 1, 2, 0), "below-infinity", ["logits", "nan", 1]),
        ({"tail": torch.full((4, 6), math.nan)}, "below-infinity", ["tail", "nan", 0, 1]),
    ],
)
def test_what_a_loss_cannot_take_is_told_by_key_and_row(replaced, code, of):
    (found,) = refusal(training, batch(**replaced))
    assert found.key == of[0]
    assert_refused(found, code, *of)


# Behind a row's mask, in its first column (of which nothing is predicted), and in rows that are dropped.
UNREAD = [(1, 4), (2, slice(None)), (0, 0), (3, slice(None))]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("place", UNREAD, ids=str)
def test_anything_may_stand_where_no_token_counts(garbage, place):
    training(batch(**changed("logprobs", garbage, *place)))
    training(batch(**changed("advantages", garbage, *place)))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_a_rolled_column_is_read_one_to_the_left(garbage):
    for place in [(1, 3), (0, 5), (2,), (3,)]:
        training(batch(**changed("rolled", garbage, *place)))
        training(batch(**changed("logits", garbage, *place)))
        training(batch(**changed("ids", -7, *place)))
        training(batch(tail=changed("rolled", garbage, *place)["rolled"]))


@pytest.mark.parametrize(
    "replaced",
    [
        {},
        {"input_ids": torch.zeros(4, 6, dtype=torch.int32)},
        {"input_lengths": None},
        {"input_lengths": torch.tensor([6, 6, 6, 6], dtype=torch.int32)},
        {"token_mask": torch.ones(4, 6).bool(), "sample_mask": torch.ones(4).long()},
        {"logprobs": torch.zeros(4, 6).bfloat16(), "rolled": torch.zeros(4, 6).double()},
        {"advantages": torch.zeros(4, 6).long()},
        # What such numbers lead to is skipped and reported, not refused.
        {"advantages": torch.full((4, 6), math.nan)},
        # Of a vocabulary that is named whole nothing is left; a teacher may rule tokens out.
        {"tail": torch.full((4, 6), -math.inf), "logits": torch.full((4, 6, 3), -math.inf)},
        {"unread": torch.full((4, 9), math.nan), "logprobs": torch.zeros(4, 1).expand(4, 6)},
    ],
    ids=lambda replaced: " ".join(replaced) or "plain",
)
def test_whatever_a_loss_can_take_passes(replaced):
    training(batch(**replaced))
    training(batch(**replaced).slice(0, 0))


def test_all_problems_are_told_at_once():
    wrong = changed("input_ids", 99, 2, 1) | changed("sample_mask", 3.0, 1) | {"rolled": None}
    found = refusal(training, batch(**wrong, logprobs=torch.zeros(4, 6).int()))
    assert [one.key for one in found] == ["input_ids", "sample_mask", "logprobs", "rolled"]


@given(st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))
def test_the_rows_are_those_that_hold_the_value_where_it_counts(wrong: set[int], dropped: set[int]):
    logprobs = torch.zeros(12, 3)
    logprobs[sorted(wrong), 2] = -math.inf
    samples = torch.ones(12)
    samples[sorted(dropped)] = 0
    data = BatchedDataDict(
        input_ids=torch.zeros(12, 3).long(), token_mask=torch.ones(12, 3), sample_mask=samples, own=logprobs
    )
    counted = sorted(wrong - dropped)
    if not counted:
        CHECK.training(data, [Column("own", "own")])
        return
    (found,) = refusal(CHECK.training, data, [Column("own", "own")])
    said = str(found).split(" in row")[1].split(";")[0].removeprefix("s").split(" and ")[0]
    assert [int(row) for row in said.split(",")] == counted[:8]


def test_rows_longer_than_the_models_positions_are_refused_and_padding_is_not():
    wide = {"input_ids": torch.zeros(2, 12).long()}
    for lengths in ([8, 0], [1, 8]):
        CHECK.reading(BatchedDataDict(**wide, input_lengths=torch.tensor(lengths)))
    (found,) = refusal(CHECK.reading, BatchedDataDict(**wide, input_lengths=torch.tensor([8, 9])))
    assert_refused(found, "positions", "input_lengths: 9", 1, 8, "model.max_position_embeddings")
    (found,) = refusal(
        CHECK.training, BatchedDataDict(**wide, token_mask=torch.ones(2, 12), sample_mask=torch.ones(2)), ()
    )
    assert_refused(found, "positions", "input_ids: 12", "input_lengths", 8)


def test_lengths_are_needed_where_something_reads_them():
    data = batch(input_lengths=None)
    experts = BatchCheck(VOCABULARY, 8, layers="experts")
    for needed_by, refuse in (
        ("", partial(refusal, CHECK.reading)),
        (PACKING.section, partial(refusal, training, check=BatchCheck(VOCABULARY, 8, PACKING))),
        ("experts", partial(refusal, training, check=experts)),
    ):
        (found,) = refuse(data)
        assert_refused(found, "missing", "input_lengths", needed_by)
    training(data, experts, eval_mode=True)  # without gradients those layers are not followed


def test_rows_that_no_microbatch_has_room_for_are_refused():
    data = batch(input_lengths=torch.tensor([5, 4, 0, 6]), token_mask=torch.ones(4, 6))
    (found,) = refusal(CHECK_OF_BUDGETS.reading, data)
    assert_refused(
        found, "token-budget", "input_lengths: 5", "0, 3", f"{PACKING.section}.logprob_mb_tokens: 4"
    )
    long, marked = refusal(training, data, CHECK_OF_BUDGETS)
    assert_refused(long, "token-budget", "input_lengths: 6", 3, f"{PACKING.section}.train_mb_tokens: 5")
    assert_refused(marked, "padding", "token_mask: 1.0", "0, 1, 2", "input_lengths")
    within = torch.arange(6) < torch.tensor([[5], [4], [0], [5]])
    training(batch(input_lengths=torch.tensor([5, 4, 0, 5]), token_mask=within.float()), CHECK_OF_BUDGETS)


@pytest.mark.parametrize("check", [CHECK, BatchCheck(VOCABULARY, 8, replace(PACKING, train=8, logprob=8))])
def test_marks_in_the_padding_are_refused_wherever_a_mask_is_read(check):
    marked = batch(**changed("token_mask", 1.0, 1, 5))
    reads = (partial(check.reading, trained_only=True), partial(check.reading, trained_only=True, k=2))
    trains = (partial(training, check=check), partial(training, check=check, eval_mode=True))
    calls = reads if check is CHECK else (*reads, *trains)
    for call in calls:
        (found,) = refusal(call, marked)
        assert_refused(found, "padding", "token_mask: 1.0", 1, "input_lengths")
        call(batch())
    check.reading(marked)


def test_prompts_have_a_token_and_the_key_of_their_noise_and_maybe_a_turn_and_stop_strings():
    keys = {"prompt_index": torch.arange(4), "sample_index": torch.arange(4)}
    asked = batch(input_lengths=torch.tensor([6, 1, 2, 5]), **keys)
    CHECK.prompts(asked)
    strings = [("a", "b"), (), ("c",), ()]
    CHECK.prompts(BatchedDataDict(asked, turn_index=torch.arange(4), stop_strings=strings))
    empty, listed = refusal(CHECK.prompts, batch(prompt_index=keys["prompt_index"], sample_index=[0] * 4))
    assert_refused(empty, "columns", "input_lengths: 0", 2, 1, 6)
    assert_refused(listed, "no-tensor", "sample_index", "list")
    wrong = BatchedDataDict(asked, turn_index=torch.zeros(4, 1), stop_strings=[(), ("a", ""), (), ()])
    turns, strings = refusal(CHECK.prompts, wrong)
    assert_refused(turns, "shape", "turn_index", [4, 1], [4])
    assert_refused(strings, "empty-text", "stop_strings", 1)


@pytest.mark.parametrize("k", [0, 33])
def test_more_choices_than_the_vocabulary_has_are_refused(k):
    CHECK.reading(batch(), k=1)
    CHECK.reading(batch(), k=32)
    (found,) = refusal(CHECK.reading, batch(), k=k)
    assert_refused(found, "k", k, 1, 32, "model.vocab_size")


def test_the_check_of_a_policy_knows_what_reads_the_lengths():
    from nemo_rl_mcore.recipe.load import load_config

    recipe = "examples/configs/grpo_copy_cpu.yaml"
    plain = BatchCheck.of(load_config(recipe).policy)
    assert (plain.vocab_size, plain.budgets, plain.layers) == (32, None, None)
    dynamic = load_config(recipe, ["policy.dynamic_batching.enabled=true"]).policy
    assert BatchCheck.of(dynamic).budgets == dynamic.token_budgets
    predicting = load_config(recipe, ["policy.model.mtp_num_layers=1"]).policy
    assert BatchCheck.of(predicting).layers == "multi-token prediction"


def test_routes_lead_to_experts_of_the_model():
    check = replace(CHECK, routes=(2, 3, 4))
    routes = torch.full((ROWS, COLUMNS, 2, 3), -1, dtype=torch.int8)
    routes[1] = 3
    check.training(batch(routed_experts=routes), READ)
    for wrong, code in (
        (routes[:, :, :1], "shape"),
        (routes + 1, "experts"),
        (routes - 1, "experts"),
        (None, "missing"),
    ):
        with pytest.raises(BatchError) as caught:
            check.training(batch(routed_experts=wrong), READ)
        assert [(one.code, one.key) for one in caught.value.findings] == [(code, "routed_experts")]
    check.reading(batch())
    CHECK.training(batch(routed_experts=routes + 1), READ)
