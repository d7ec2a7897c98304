"""DPO over Protocol fakes: pairs given or made, the reference, and what the policy is trained with."""

import pytest
import torch
from algorithm_fakes import TOKENIZER, recipe
from algorithm_fakes import run as run_to_its_end

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.answers import PreferenceSource
from nemo_rl_mcore.data.datasets import DigitTaskSource, EpochSource, Prompt, PromptSource
from nemo_rl_mcore.driver.algorithms import dpo
from nemo_rl_mcore.driver.algorithms.dpo import ReferenceBlocks, best_against_worst
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.losses import DPOLossFn

ONLINE = {"num_generations_per_prompt": 3}
MEGATRON = {"optimizer": {"lr": 1e-3}}


def run(policy_keys=None, **dpo):
    algorithm = run_to_its_end(recipe("dpo", policy_keys, dpo=dpo))
    return algorithm.policy, algorithm.observer, algorithm.pairs


def test_offline_a_step_takes_the_pairs_asks_the_reference_and_trains():
    policy, notes, pairs = run()
    assert policy.calls == ["update_weights", "offload", *["reference", "train"] * 2]
    assert notes.phases == ["reference", "train"] * 2
    for step, batch in enumerate(policy.batches, start=1):
        given = pairs.train_batch(step, 4)
        assert torch.equal(batch["input_ids"], given["input_ids"])
        assert batch["prompt_index"][::2].tolist() == batch["prompt_index"][1::2].tolist()


def test_the_reference_of_column_i_is_that_of_token_i_plus_1():
    policy, _, _ = run()
    reference = policy.batches[0]["reference_policy_logprobs"]
    # The fake's log-probability of a token is the number of its column, and 0 where none is asked for.
    columns, mask = torch.arange(reference.shape[1]), policy.batches[0]["token_mask"]
    assert reference[0, :-1].tolist() == (columns * mask[0])[1:].tolist()
    assert reference.any()


def test_a_step_takes_as_many_pairs_as_the_batch_has_samples():
    sizes = {"train_global_batch_size": 6, "train_micro_batch_size": 3}
    policy, _, _ = run(sizes, val_at_end=True, val_batches=1, max_val_samples=1)
    for call in (*policy.trained, *policy.evaluated):
        # The worker makes rows of the recipe's samples: 12 and 6.
        assert (call.data.size, call.gbs, call.mbs) == (12, None, None)


@pytest.mark.parametrize("fused", [True, False])
def test_the_loss_is_that_of_the_recipe(fused):
    megatron = {"megatron_cfg": MEGATRON | {"use_fused_linear_logprobs": fused}}
    policy, notes, _ = run(
        megatron, reference_policy_kl_penalty=0.3, sft_loss_weight=0.1, sft_average_log_probs=True
    )
    loss_fn = policy.loss_fns[0]
    assert isinstance(loss_fn, DPOLossFn)
    assert loss_fn.use_fused_linear_logprobs is fused
    cfg = loss_fn.cfg
    assert (cfg.reference_policy_kl_penalty, cfg.sft_loss_weight) == (0.3, 0.1)
    assert cfg.sft_average_log_probs
    assert notes.steps[1]["train/total_num_tokens"] == policy.batches[0]["input_lengths"].sum()


def test_a_validation_offline_takes_the_loss_of_held_out_pairs_too():
    policy, notes, pairs = run(val_period=2, val_batches=2, val_global_batch_size=3)
    assert policy.calls[-6:] == ["validate", "offload", *["reference", "evaluate"] * 2]
    call = policy.evaluated[0]
    asked = [call.data["input_ids"] for call in policy.evaluated]
    assert torch.equal(torch.cat(asked), pairs.rows(pairs.prompts.validation(6))["input_ids"])
    first = int(call.data["token_mask"][0].argmax())
    assert call.data["reference_policy_logprobs"][0, first - 1] == first, "rolled as in training"
    found = notes.steps[2]
    assert found["validation/loss"] == 0.75
    assert found["validation/preference_accuracy"] == pytest.approx((0.25 * 30 + 0.75 * 10) / 40)
    assert found["validation/rewards_margin_mean"] == pytest.approx((1.0 * 30 + 2.0 * 10) / 40 - 0.5)
    assert notes.steps[1]["train/preference_accuracy"] == notes.steps[1]["train/accuracy"] != 0
    assert notes.steps[1]["train/rewards_margin_mean"] == found["validation/rewards_margin_mean"]
    # None of the fake's greedy answers is right in full: this is not the accuracy of the pairs.
    assert found["validation/accuracy"] == sum(s.reward >= 1 for s in notes.sampled) / len(notes.sampled)


def test_online_a_step_makes_its_pairs():
    policy, notes, _ = run({"train_global_batch_size": 12}, **ONLINE, val_at_end=True)
    step = ["update_weights", "generate", "offload", "reference", "train"]
    validation = ["update_weights", "validate", "offload"]
    assert policy.calls == [*step * 2, *validation], "no loss of held-out pairs"
    assert notes.phases[:4] == ["generation", "reference", "train", "weight_sync"]
    batch = policy.batches[0]
    assert batch.size == 24
    chosen, rejected = batch["rewards"][::2], batch["rewards"][1::2]
    assert (chosen >= rejected).all()
    assert torch.equal(batch["sample_mask"][::2], (chosen > rejected).float())
    assert notes.steps[1]["train/pairs_with_signal"] == float((chosen > rejected).float().mean())
    assert 0 < notes.steps[1]["train/pairs_with_signal"] < 1, "both kinds are in the step"
    written = [sample for sample in notes.sampled if sample.step == 1]
    assert len(written) == 36
    assert sum(sample.sample_mask for sample in written) == batch["sample_mask"].sum(), (
        "those of a pair that counts"
    )
    assert all(sample.advantage is None for sample in written)


def pairs_of(*rewards_of_prompts, **columns):
    """The rows that are picked from prompts with as many answers each."""
    rewards = torch.tensor(rewards_of_prompts)
    rows = rewards.numel()
    batch = BatchedDataDict(
        rewards=rewards.flatten(),
        row=torch.arange(rows),
        sample_mask=torch.ones(rows),
        token_mask=torch.ones(rows, 2),
        **columns,
    )
    return best_against_worst(Rollout(batch, [], []), rewards.shape[1])


def test_the_best_answer_is_put_against_the_worst_of_the_same_prompt():
    batch, with_signal = pairs_of([0.0, 1.0, 0.5], [0.2, 0.1, 0.9], [3.0, -1.0, 2.0])
    assert batch["row"].tolist() == [1, 0, 5, 4, 6, 7]
    assert batch["sample_mask"].tolist() == [1] * 6
    assert with_signal == 1


def test_the_reference_of_given_answers_is_asked_for_once():
    keys = {"val_batches": 1, "max_val_samples": 1, "val_at_start": True, "val_at_end": True}
    policy, _, _ = run(**keys)
    assert policy.calls.count("evaluate") == 2
    assert policy.calls.count("reference") == 3, "two steps of new pairs, and the first validation"
    first, last = (call.data["reference_policy_logprobs"] for call in policy.evaluated)
    assert torch.equal(first, last)


class Continued(PromptSource):
    """Pairs whose chosen answers are the same tokens, divided into prompt and answer in other ways."""

    def train_batch(self, step, count):
        assert count == 4
        texts = (("12>", "345"), ("12>3", "45"), ("12>34", "5"), ("1", "2>345"))
        return [
            Prompt(index, text, answer, rejected="0") for index, (text, answer) in enumerate(texts, 4 * step)
        ]


def test_the_same_tokens_divided_in_another_way_have_a_reference_of_their_own():
    prompts = Continued()
    config, pairs = recipe("dpo", {"max_total_sequence_length": 16}), PreferenceSource(prompts, TOKENIZER)
    for batch in run_to_its_end(config, prompts=prompts, pairs=pairs).policy.batches:
        columns = torch.arange(batch["input_ids"].shape[1])
        reference = batch["reference_policy_logprobs"].roll(1, dims=1)
        assert torch.equal(reference, columns * batch["token_mask"])


# The reference of given pairs


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


def references(pairs, first=1):
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
    undisturbed = references(pairs)
    assert all(reference.any() for reference, _ in undisturbed.values())
    for first in range(2, STEPS + 1):
        for step, (reference, _) in references(pairs, first).items():
            assert torch.equal(reference, undisturbed[step][0]), (first, step)


def test_it_is_asked_for_once_a_pair_while_there_is_room(kept_blocks):
    asked = [count for _, count in references(given_pairs(rows=8)).values()]
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
    assert [count for _, count in references(pairs).values()] == [COUNT] * STEPS


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
