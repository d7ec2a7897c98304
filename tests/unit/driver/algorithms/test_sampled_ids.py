"""What is trained on is compared with what engines drew, row by row and turn by turn."""

import random

import pytest
import torch
from algorithm_fakes import select
from refusals import refused

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import digest_of_ids, digests_of_rows
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.driver.rollouts.saved import load_groups, save_groups
from nemo_rl_mcore.driver.rollouts.transcript import concatenate_batches, require_sampled_ids
from nemo_rl_mcore.errors import RunStoppedError

TURNS, TOKENS = 3, 40
PROMPT = 3


def played(rows=6, seed=0, turns=TURNS, tokens=TOKENS):
    """Episodes of random ids: a prompt, then answers and observations of random lengths."""
    draws = random.Random(seed)
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    turn_of_token = torch.zeros_like(ids)
    digests = torch.zeros(rows, turns, dtype=torch.long)
    for row in range(rows):
        at = PROMPT
        ids[row, :at] = 9
        for turn in range(1, draws.randint(1, turns) + 1):
            answer = [draws.randrange(32) for _ in range(draws.randint(1, 5))]
            ids[row, at : at + len(answer)] = torch.tensor(answer)
            turn_of_token[row, at : at + len(answer)] = turn
            digests[row, turn - 1] = digest_of_ids(answer)
            at += len(answer)
            observed = draws.randint(0, 4)
            ids[row, at : at + observed] = 8
            at += observed
    batch = BatchedDataDict(
        input_ids=ids,
        input_lengths=torch.full((rows,), tokens),
        token_mask=(turn_of_token > 0).float(),
        prompt_index=torch.arange(rows) // 2,
        sample_index=torch.arange(rows) % 2,
        sampled_digests=digests,
    )
    return BatchedDataDict(batch, turn_of_token=turn_of_token) if turns > 1 else batch


def test_a_digest_is_of_the_ids_their_order_and_their_number():
    rows = [[1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 3, 0], [258, 3]]
    assert len({digest_of_ids(row) for row in rows}) == 5
    assert digest_of_ids([1, 2, 3]) == digest_of_ids([1, 2, 3])
    assert digest_of_ids([1, 2, 3]) == -5405627362230748553
    together = digests_of_rows(torch.tensor([[1, 2, 3], [3, 2, 1]]), torch.tensor([3, 2]))
    assert together.tolist() == [digest_of_ids([1, 2, 3]), digest_of_ids([3, 2])]


@pytest.mark.parametrize("turns", [1, TURNS])
def test_ids_as_they_were_sampled_pass_also_in_another_order_or_padded(turns, tmp_path):
    batch = played(turns=turns)
    require_sampled_ids(batch)
    rollout = Rollout(batch, [Prompt(i, "", "") for i in range(6)], [""] * 6)
    require_sampled_ids(select(rollout, [5, 0, 3]).batch)
    other = played(seed=1, turns=turns, tokens=50)
    require_sampled_ids(concatenate_batches([batch, other, batch], 7))
    save_groups(tmp_path, {3: batch})
    loaded = load_groups(tmp_path)[3]
    require_sampled_ids(loaded)
    assert torch.equal(loaded["sampled_digests"], batch["sampled_digests"])


def place_of(batch, row, turn):
    return int((batch["turn_of_token"][row] == turn).nonzero()[0])


@pytest.mark.parametrize("change", ["id", "mask", "turn", "observation", "digest", "one more turn"])
def test_anything_else_names_the_answer(change):
    batch = played(rows=40)
    row = next(
        row for row in range(40) if batch["sampled_digests"][row, 1] and not batch["sampled_digests"][row, 2]
    )
    place = place_of(batch, row, 2)
    what = "answer 2"
    match change:
        case "id":
            batch["input_ids"][row, place] += 1
        case "mask":
            batch["token_mask"][row, place] = 0
        case "turn":
            batch["turn_of_token"][row, place] = 3
        case "observation":
            batch["token_mask"][row, PROMPT - 1], what = 1, "an observation"
        case "digest":
            batch["sampled_digests"][row, 1] = 0
        case "one more turn":
            batch["token_mask"][row, -1], batch["turn_of_token"][row, -1], what = 1, 4, "answer 4"
    name = f"prompt_index {row // 2}, sample_index {row % 2}: {what} "
    with refused("ids-differ", name, by=RunStoppedError):
        require_sampled_ids(batch)


def test_a_turn_that_was_sampled_and_is_not_trained_on_is_found():
    batch = played(turns=1)
    batch["token_mask"][2] = 0
    with refused("ids-differ", "prompt_index 1, sample_index 0: answer 1", by=RunStoppedError):
        require_sampled_ids(batch)


def test_an_engine_that_gives_no_digests_is_not_compared():
    batch = played()
    del batch["sampled_digests"]
    batch["input_ids"] += 1
    require_sampled_ids(batch)
