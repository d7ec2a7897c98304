"""DPO over Protocol fakes: pairs given or made, the reference, and what the policy is trained with."""

import pytest
import torch
from algorithm_fakes import TOKENIZER, FakePolicy, Notes, collector, recipe, source, train

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.answers import PreferenceSource
from nemo_rl_mcore.data.datasets import Prompt, PromptSource
from nemo_rl_mcore.driver.algorithms.dpo import DPOTrainer, best_against_worst
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.losses import DPOLossFn

ONLINE = {"num_generations_per_prompt": 3}
MEGATRON = {"optimizer": {"lr": 1e-3}}


def run(policy_keys=None, reasons=(None, None), **dpo):
    policy, notes = FakePolicy(reasons=reasons), Notes()
    config = recipe("dpo", policy_keys, dpo=dpo)
    prompts = source(config)
    pairs = (
        None if config.dpo.num_generations_per_prompt else PreferenceSource(prompts, TOKENIZER, made_up=True)
    )
    train(DPOTrainer(config, policy, collector(config, policy), prompts, notes, pairs=pairs))
    return policy, notes, pairs


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
    assert (cfg.reference_policy_kl_penalty, cfg.sft_loss_weight, cfg.sft_average_log_probs) == (
        0.3,
        0.1,
        True,
    )
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


def test_equal_rewards_make_no_pair():
    batch, with_signal = pairs_of([1.0, 1.0], [0.0, 0.0], [0.0, 0.5])
    assert batch["sample_mask"].tolist() == [0, 0, 0, 0, 1, 1]
    assert with_signal == pytest.approx(1 / 3)


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
    policy, notes = FakePolicy(), Notes()
    config, prompts = recipe("dpo", {"max_total_sequence_length": 16}), Continued()
    pairs = PreferenceSource(prompts, TOKENIZER)
    train(DPOTrainer(config, policy, collector(config, policy), prompts, notes, pairs=pairs))
    for batch in policy.batches:
        columns = torch.arange(batch["input_ids"].shape[1])
        reference = batch["reference_policy_logprobs"].roll(1, dims=1)
        assert torch.equal(reference, columns * batch["token_mask"])
