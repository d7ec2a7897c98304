"""SFT and distillation over Protocol fakes: what they train on, and how SFT validates."""

import pytest
import torch
from algorithm_fakes import TOKENIZER, recipe
from algorithm_fakes import run as run_to_its_end

from nemo_rl_mcore.data.datasets import EpochSource, Prompt
from nemo_rl_mcore.losses import DistillationLossFn, NLLLossFn


def run(policy_keys=None, **sft):
    algorithm = run_to_its_end(recipe("sft", policy_keys, sft=sft))
    return algorithm.policy, algorithm.observer, algorithm.prompts


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
    loop = {"val_at_end": True, "max_val_samples": 0} | sizes
    data = {"dataset_name": "files", "train": {"data_path": "rows.jsonl"}}
    config = recipe("sft", sft=loop, data=data)
    given = [Prompt(index, f"{index}>", "12") for index in range(30)]
    prompts = EpochSource(given[:20], given[20:], seed=0, per_step=4)
    algorithm = run_to_its_end(config, prompts=prompts)
    evaluated = algorithm.policy.evaluated
    assert [call.data.size for call in evaluated] == rows
    taken = [index for call in evaluated for index in call.data["prompt_index"].tolist()]
    assert taken == [*range(20, 20 + sum(rows))]
    assert algorithm.observer.steps[2]["validation/loss"] == 0.75


# Distillation: whose answers, what the teacher is asked, and the policy gradient beside it


RL = {"rl_weight": 0.5, "rl": {"reference_policy_kl_penalty": 0.0}}


def distilled(distillation=None, loss_fn=None, **top):
    config = recipe("distillation", distillation=distillation or {}, loss_fn=loss_fn or {}, **top)
    algorithm = run_to_its_end(config)
    return algorithm.policy, algorithm.teacher, algorithm.observer, algorithm.prompts


def test_on_policy_the_teacher_judges_the_students_answers():
    policy, teacher, notes, _ = distilled()
    assert policy.calls == ["update_weights", "generate", "offload", "topk", "train"] * 2
    assert notes.phases == ["generation", "teacher", "train", "weight_sync", "generation", "teacher", "train"]
    assert teacher.asked == [({"input_ids", "input_lengths", "token_mask"}, 2)] * 2
    assert not teacher.trained
    assert policy.batches[0].size == 12
    assert "train/reward" in notes.steps[1]
    assert len(notes.sampled) == 24


def test_what_the_teacher_says_stands_under_the_keys_of_the_loss():
    policy, _, _, _ = distilled()
    batch = policy.batches[0]
    shape = list(batch["input_ids"].shape)
    assert list(batch["teacher_topk_logits"].shape) == [*shape, 2]
    assert batch["teacher_topk_indices"][0, 0].tolist() == [0, 1]
    assert (batch["teacher_logsumexp"] == 2).all()


def test_without_k_the_teacher_names_the_whole_vocabulary():
    _, teacher, _, _ = distilled({"topk_logits_k": None})
    assert teacher.asked[0][1] == 32


def test_off_policy_the_answers_are_those_of_the_data_set():
    policy, _, notes, prompts = distilled(
        {"on_policy": False, "num_generations_per_prompt": 1, "val_at_end": True}, {"kl_type": "reverse"}
    )
    validation = ["update_weights", "validate", "offload"]
    assert policy.calls == ["update_weights", "offload", *["topk", "train"] * 2, *validation]
    for number, batch in enumerate(policy.batches, start=1):
        drawn = prompts.train_batch(number, 4)
        for row, prompt in enumerate(drawn):
            text = TOKENIZER.encode(f"{prompt.text}{prompt.answer}")
            assert batch["input_ids"][row].tolist() == [*text, TOKENIZER.eos_token_id]
    assert notes.steps[1]["train/total_num_tokens"] == 24
    assert "train/reward" not in notes.steps[1]
    assert "validation/accuracy" in notes.steps[2]


def test_the_loss_is_that_of_the_recipe():
    policy, _, _, _ = distilled(loss_fn={"kl_type": "jsd", "jsd_beta": 0.2})
    assert isinstance(policy.loss_fns[0], DistillationLossFn)
    assert (policy.loss_fns[0].cfg.kl_type, policy.loss_fns[0].cfg.jsd_beta) == ("jsd", 0.2)
    assert not policy.loss_fns[0].needs_tokens


def test_the_policy_gradient_beside_it_has_its_log_probabilities_and_advantages():
    estimator = {"normalize_rewards": False}
    policy, _, notes, _ = distilled({"adv_estimator": estimator}, RL)
    assert policy.calls[1:6] == ["generate", "offload", "logprobs", "topk", "train"]
    assert notes.phases[:4] == ["generation", "logprobs", "teacher", "train"]
    for batch in policy.batches:
        rewards = batch["rewards"].view(4, 3)
        others = (rewards.sum(1, keepdim=True) - rewards) / 2
        expected = (rewards - others).flatten()[:, None].expand_as(batch["advantages"])
        torch.testing.assert_close(batch["advantages"], expected)
        assert not batch["prev_logprobs"].any()
    assert "train/advantages_mean" in notes.steps[1]
    assert policy.loss_fns[0].needs_tokens


def test_its_penalty_asks_the_reference():
    policy, _, _, _ = distilled(loss_fn=RL | {"rl": {"reference_policy_kl_penalty": 0.1}})
    assert policy.calls[1:6] == ["generate", "offload", "logprobs", "reference", "topk"]
    assert "reference_policy_logprobs" in policy.batches[0]
