"""SFT over Protocol fakes: what it trains on, and how it validates."""

import pytest
import torch
from algorithm_fakes import TOKENIZER, FakePolicy, Notes, collector, recipe, source, train

from nemo_rl_mcore.data.datasets import EpochSource, Prompt
from nemo_rl_mcore.driver.algorithms.sft import SFTTrainer
from nemo_rl_mcore.losses import NLLLossFn


def run(policy_keys=None, **sft):
    policy, notes = FakePolicy(), Notes()
    config = recipe("sft", policy_keys, sft=sft)
    prompts = source(config)
    train(SFTTrainer(config, policy, collector(config, policy), prompts, notes))
    return policy, notes, prompts


def test_a_step_trains_on_other_prompts_with_their_answers():
    policy, notes, prompts = run()
    assert policy.calls == ["update_weights", "offload", "train", "train"]
    assert notes.phases == ["train"] * 2
    for step, batch in enumerate(policy.batches, start=1):
        drawn = prompts.train_batch(step, 4)
        assert batch["prompt_index"].tolist() == [prompt.index for prompt in drawn]
        for row, prompt in enumerate(drawn):
            text = TOKENIZER.encode(f"{prompt.text}{prompt.answer}")
            assert batch["input_ids"][row].tolist() == [*text, TOKENIZER.eos_token_id]
    assert policy.batches[0]["prompt_index"].tolist() != policy.batches[1]["prompt_index"].tolist()


def test_the_answer_and_its_end_are_trained_on_and_the_prompt_is_not():
    policy, notes, _ = run()
    for batch in policy.batches:
        assert batch["token_mask"].tolist() == [[0, 0, 0, 1, 1, 1]] * 4, (
            "three tokens of prompt, two and the end"
        )
        assert batch["sample_mask"].tolist() == [1] * 4
    assert notes.steps[1]["train/total_num_tokens"] == 24
    assert notes.steps[1]["train/loss"] == 0.75


@pytest.mark.parametrize("fused", [True, False])
def test_the_loss_is_the_likelihood_of_the_recipe(fused):
    optimizer = {"optimizer": {"lr": 1e-3}}
    policy, _, _ = run({"megatron_cfg": optimizer | {"use_fused_linear_logprobs": fused}}, val_at_end=True)
    for call in (*policy.trained, *policy.evaluated):
        assert isinstance(call.loss_fn, NLLLossFn)
        assert call.loss_fn.use_fused_linear_logprobs is fused


def test_a_validation_takes_the_loss_of_held_out_answers_and_asks_for_answers():
    policy, notes, prompts = run(val_period=2, val_batches=1, val_global_batch_size=8, val_batch_size=3)
    assert policy.calls[-5:] == ["update_weights", "validate", "validate", "offload", "evaluate"]
    (call,) = policy.evaluated
    held_out = prompts.validation(8)
    assert call.data["prompt_index"].tolist() == [prompt.index for prompt in held_out]
    assert not {row for batch in policy.batches for row in batch["prompt_index"].tolist()} & {
        prompt.index for prompt in held_out
    }
    assert torch.equal(call.data["token_mask"].sum(1), torch.full((8,), 3.0))
    found = notes.steps[2]
    assert found["validation/loss"] == 0.75
    assert {"validation/accuracy", "validation/reward"} <= found.keys()
    assert not any(name.startswith("validation") for name in notes.steps[1])
    assert len(policy.trained) == 2


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ({"val_batches": -1, "val_global_batch_size": 4}, [4, 4, 2]),
        ({"val_batches": -1, "val_global_batch_size": 64}, [10]),
        ({"val_batches": -1}, [4, 4, 2]),
        ({"val_batches": 2, "val_global_batch_size": 3}, [3, 3]),
        ({"val_batches": 5, "val_global_batch_size": 3}, [3, 3, 3, 1]),
    ],
)
def test_a_validation_takes_the_held_out_rows_in_batches_of_its_own(sizes, rows):
    policy, notes = FakePolicy(), Notes()
    loop = {"val_at_end": True, "max_val_samples": 0} | sizes
    data = {"dataset_name": "files", "train": {"data_path": "rows.jsonl"}}
    config = recipe("sft", sft=loop, data=data)
    given = [Prompt(index, f"{index}>", "12") for index in range(30)]
    prompts = EpochSource(given[:20], given[20:], seed=0, per_step=4)
    train(SFTTrainer(config, policy, collector(config, policy), prompts, notes))
    assert [call.data.size for call in policy.evaluated] == rows
    taken = [index for call in policy.evaluated for index in call.data["prompt_index"].tolist()]
    assert taken == [*range(20, 20 + sum(rows))]
    assert notes.steps[2]["validation/loss"] == 0.75
