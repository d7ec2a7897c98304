"""Distillation over Protocol fakes: whose answers, what the teacher is asked, and the policy gradient beside it."""

import torch
from algorithm_fakes import (
    TOKENIZER,
    FakeModel,
    FakePolicy,
    Notes,
    collector,
    recipe,
    source,
    train,
)

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.distillation import DistillationTrainer
from nemo_rl_mcore.losses import DistillationLossFn

RL = {"rl_weight": 0.5, "rl": {"reference_policy_kl_penalty": 0.0}}


class FakeTeacher(FakeModel):
    """Names the first k ids at every position."""

    def __init__(self, calls):
        super().__init__(calls, "teacher")
        self.asked = []

    def get_topk_logits(self, data, k, *, trained_only=False):
        self.calls.append("topk")
        self.asked.append((set(data), k))
        shape = data["input_ids"].shape
        return BatchedDataDict(
            topk_logits=torch.ones(*shape, k),
            topk_indices=torch.arange(k).expand(*shape, k),
            logsumexp=torch.full(shape, 2.0),
        )


def run(distillation=None, loss_fn=None, **top):
    policy, notes = FakePolicy(), Notes()
    teacher = FakeTeacher(policy.calls)
    config = recipe("distillation", distillation=distillation or {}, loss_fn=loss_fn or {}, **top)
    prompts = source(config)
    train(DistillationTrainer(config, policy, collector(config, policy), prompts, notes, teacher=teacher))
    return policy, teacher, notes, prompts


def test_on_policy_the_teacher_judges_the_students_answers():
    policy, teacher, notes, _ = run()
    assert policy.calls == ["update_weights", "generate", "offload", "topk", "train"] * 2
    assert notes.phases == ["generation", "teacher", "train", "weight_sync", "generation", "teacher", "train"]
    assert teacher.asked == [({"input_ids", "input_lengths", "token_mask"}, 2)] * 2
    assert not teacher.trained
    assert policy.batches[0].size == 12
    assert "train/reward" in notes.steps[1]
    assert len(notes.sampled) == 24


def test_what_the_teacher_says_stands_under_the_keys_of_the_loss():
    policy, _, _, _ = run()
    batch = policy.batches[0]
    shape = list(batch["input_ids"].shape)
    assert list(batch["teacher_topk_logits"].shape) == [*shape, 2]
    assert batch["teacher_topk_indices"][0, 0].tolist() == [0, 1]
    assert (batch["teacher_logsumexp"] == 2).all()


def test_without_k_the_teacher_names_the_whole_vocabulary():
    _, teacher, _, _ = run({"topk_logits_k": None})
    assert teacher.asked[0][1] == 32


def test_off_policy_the_answers_are_those_of_the_data_set():
    policy, _, notes, prompts = run(
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
    policy, _, _, _ = run(loss_fn={"kl_type": "jsd", "jsd_beta": 0.2})
    assert isinstance(policy.loss_fns[0], DistillationLossFn)
    assert (policy.loss_fns[0].cfg.kl_type, policy.loss_fns[0].cfg.jsd_beta) == ("jsd", 0.2)
    assert not policy.loss_fns[0].needs_tokens


def test_the_policy_gradient_beside_it_has_its_log_probabilities_and_advantages():
    estimator = {"normalize_rewards": False}
    policy, _, notes, _ = run({"adv_estimator": estimator}, RL)
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
    policy, _, _, _ = run(loss_fn=RL | {"rl": {"reference_policy_kl_penalty": 0.1}})
    assert policy.calls[1:6] == ["generate", "offload", "logprobs", "reference", "topk"]
    assert "reference_policy_logprobs" in policy.batches[0]
