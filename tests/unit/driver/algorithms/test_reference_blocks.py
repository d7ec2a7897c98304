"""The reference of given pairs is of fixed blocks: the same numbers after a resume, within a bound of memory."""

import pytest
import torch
from algorithm_fakes import TOKENIZER

from nemo_rl_mcore.data.answers import PreferenceSource
from nemo_rl_mcore.data.datasets import DigitTaskSource, EpochSource, Prompt
from nemo_rl_mcore.driver.algorithms import dpo
from nemo_rl_mcore.driver.algorithms.dpo import ReferenceBlocks

COUNT, LONGEST, STEPS = 4, 16, 9
BLOCK_BYTES = COUNT * 2 * LONGEST * 4


def given_pairs(rows=10, weights=None):
    names = ("", "") if weights is None else ("a", "b")
    prompts = [
        Prompt(row, f"{row}>", "1" * (1 + row % 5), rejected="2" * (1 + row % 3), source=names[row % 2])
        for row in range(rows)
    ]
    return PreferenceSource(EpochSource(prompts, [], 3, COUNT, weights), TOKENIZER)


class Asked:
    """A model whose numbers depend on all rows that are asked for together, and on their widths."""

    def __init__(self):
        self.batches = []

    def __call__(self, batch):
        self.batches.append(batch)
        together = batch["input_ids"].sum() + batch["input_ids"].shape[1] / 100
        return (together + torch.arange(batch["input_ids"].shape[1])) * batch["token_mask"]

    def newly(self, blocks, step, batch):
        """The reference of a step, and how many pairs were asked for."""
        before = len(self.batches)
        found = blocks.of_step(step, batch)
        return found, sum(asked.size // 2 for asked in self.batches[before:])


def run(pairs, first=1):
    """The reference of each step of a process that begins with step `first`, and the pairs that each asked for."""
    asked = Asked()
    blocks = ReferenceBlocks(pairs, asked, COUNT, LONGEST)
    return {
        step: asked.newly(blocks, step, pairs.train_batch(step, COUNT)) for step in range(first, STEPS + 1)
    }


@pytest.fixture(params=[100, 2, 0])
def kept_blocks(request, monkeypatch):
    monkeypatch.setattr(dpo, "KEPT_BYTES", request.param * BLOCK_BYTES + BLOCK_BYTES // 2)
    return request.param


@pytest.mark.parametrize("weights", [None, {"a": 3.0, "b": 1.0}])
def test_a_resumed_run_has_the_same_reference_from_any_step_on(kept_blocks, weights):
    pairs = given_pairs(weights=weights)
    undisturbed = run(pairs)
    assert all(reference.any() for reference, _ in undisturbed.values())
    for first in range(2, STEPS + 1):
        for step, (reference, _) in run(pairs, first).items():
            assert torch.equal(reference, undisturbed[step][0]), (first, step)


def test_it_is_asked_for_once_a_pair_while_there_is_room(kept_blocks):
    asked = [count for _, count in run(given_pairs(rows=8)).values()]
    kept = min(kept_blocks, 2)
    of_later_passes = COUNT if kept < 2 else 0
    assert asked == [COUNT, COUNT, *[of_later_passes] * (STEPS - 2)]


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(dpo, "KEPT_BYTES", 3 * BLOCK_BYTES)
    pairs = given_pairs(rows=40)
    blocks = ReferenceBlocks(pairs, Asked(), COUNT, LONGEST)
    for step in range(1, 31):
        blocks.of_step(step, pairs.train_batch(step, COUNT))
    rows = [row for block in blocks._kept.values() for pair in block.values() for row in pair]
    assert len(rows) == 3 * COUNT * 2
    assert {row.dtype for row in rows} == {torch.float32}
    assert 0 < sum(row.untyped_storage().nbytes() for row in rows) <= 3 * BLOCK_BYTES


def test_of_a_source_without_passes_each_step_asks_for_its_own_batch():
    pairs = PreferenceSource(DigitTaskSource("copy", 1, seed=3), TOKENIZER, made_up=True)
    assert [count for _, count in run(pairs).values()] == [COUNT] * STEPS


@pytest.mark.parametrize("room", [0, 1, 2])
def test_each_batch_of_a_validation_is_asked_for_once_while_there_is_room(monkeypatch, room):
    batches = [given_pairs().train_batch(step, COUNT) for step in (1, 2)]
    sizes = [batch["input_ids"].numel() * torch.float32.itemsize for batch in batches]
    monkeypatch.setattr(dpo, "KEPT_BYTES", sum(sizes[:room]))
    asked = Asked()
    blocks = ReferenceBlocks(given_pairs(), asked, COUNT, LONGEST)
    first, second = ([blocks.of_validation(batch) for batch in batches] for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], first[1])
    assert len(asked.batches) == 4 - room
