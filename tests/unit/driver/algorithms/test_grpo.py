"""GRPO over Protocol fakes: what is called, in which order, with what. Learning is tested on real ranks."""

import math
from dataclasses import replace

import pytest
import torch
from algorithm_fakes import LARGE_REWARDS, TOKENIZER, recipe, source
from algorithm_fakes import run as run_to_its_end
from refusals import assert_holds


def master(grpo=None, loss_fn=None, recompute="auto", **top):
    generations = (grpo or {}).get("num_generations_per_prompt", 3)
    policy = {"train_global_batch_size": 4 * generations, "recompute_prev_logprobs": recompute}
    return recipe("grpo", policy, grpo=grpo or {}, loss_fn=loss_fn or {}, **top)


def run(config, **parts):
    algorithm = run_to_its_end(config, **parts)
    return algorithm.policy, algorithm.observer


def masking(**sections):
    """Leaves out of training what is above a threshold, which is every answer: the engine gives -1 and training 0."""
    masks = {"max_new_tokens": 3, "mismatch_threshold": 1.5, "mismatch_action": "mask"}
    return recipe("grpo", {"train_global_batch_size": 12, "generation": masks}, **sections)


def test_each_step_reports_the_mismatch_and_masks_what_is_above_the_threshold():
    policy, notes = run(masking())
    assert notes.steps[1]["mismatch/max_seq_mult_prob_error"] == pytest.approx(math.e)
    assert policy.batches[0]["sample_mask"].sum() == 0


@pytest.mark.parametrize(("recompute", "passes"), [("auto", []), ("always", ["logprobs"])])
def test_a_pass_before_training_is_left_out_where_nothing_reads_it(recompute, passes):
    policy, notes = run(master(recompute=recompute))
    assert policy.calls == ["update_weights", "generate", "offload", *passes, "train"] * 2
    assert all(("prev_logprobs" in batch) == bool(passes) for batch in policy.batches)
    assert notes.steps[1]["mismatch/max_seq_mult_prob_error"] >= 1


def test_the_reference_is_asked_only_where_the_kl_penalty_is_not_zero():
    policy, _ = run(master(loss_fn={"reference_policy_kl_penalty": 0.1}))
    assert policy.calls == ["update_weights", "generate", "offload", "reference", "train"] * 2
    reference = policy.batches[0]["reference_policy_logprobs"]
    columns = torch.arange(float(reference.shape[1]))
    assert torch.equal(reference, columns * policy.batches[0]["token_mask"])


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_a_step_with_large_advantages_says_once_of_which_prompt(name, capsys):
    estimator = {"name": name, "normalize_rewards": False}
    grpo = {"num_prompts_per_step": 48, "adv_estimator": estimator, "reward_scaling": LARGE_REWARDS}
    policy, _ = run(master(grpo=grpo))
    written = capsys.readouterr().err.splitlines()
    if name == "reinforce_plus_plus":  # whitened
        assert not written
        return
    assert len(written) == 2
    for step, (line, batch) in enumerate(zip(written, policy.batches, strict=True), start=1):
        sizes = batch["advantages"][:, 0].abs()
        row = int(sizes.argsort(descending=True, stable=True)[0])
        above = int((sizes > 100).sum())
        assert above > 4
        assert line.startswith(f"step {step}: {above} of 144 ")
        digits = TOKENIZER.decode(batch["input_ids"][row][:3].tolist())
        prompt, sample, reward = (
            batch[key][row].item() for key in ("prompt_index", "sample_index", "rewards")
        )
        assert_holds(line, 100, prompt, f"'{digits}'", sample, f": {float(sizes[row]):.4g} ", f"{reward:.4g}")
        assert line.endswith(", ...")


def test_advantages_of_rows_that_are_not_trained_are_nobodys_business(capsys):
    grpo = {"adv_estimator": {"normalize_rewards": False}, "reward_scaling": LARGE_REWARDS}
    run(masking(grpo=grpo))
    assert not capsys.readouterr().err


def test_dynamic_sampling_trains_on_full_steps_of_groups_with_signal_and_writes_down_what_it_drops_too():
    policy, notes = run(master(grpo={"use_dynamic_sampling": True}))
    for batch in policy.batches:
        assert batch.size == 12
        assert (batch["prompt_index"] % 3 == 0).all()
        assert len(set(batch["prompt_index"].tolist())) == 4
    rounds = [notes.steps[step]["train/dynamic_sampling_rounds"] for step in (1, 2)]
    # A round may have prompts of two draws, which are asked for one after the other.
    assert sum(rounds) <= policy.calls.count("generate") <= 2 * sum(rounds)
    assert sum(rounds) > 2
    of_step = [sample for sample in notes.sampled if sample.step == 1 and not sample.of_validation]
    assert len(of_step) == rounds[0] * 12, "what the step had no place for is written down, too"
    trained = [sample for sample in of_step if sample.sample_mask]
    assert [sample.prompt_index for sample in trained] == policy.batches[0]["prompt_index"].tolist()
    assert all((sample.advantage is not None) == bool(sample.sample_mask) for sample in of_step)


def test_what_is_written_of_an_answer_is_what_was_trained():
    scaling = {"enabled": True, "source_min": 0.0, "source_max": 1.0, "target_min": -1.0, "target_max": 1.0}
    prompts = {"num_prompts_per_step": 12, "reward_scaling": scaling, "overlong_filtering": True}
    policy, notes = run(master(grpo=prompts))
    batch, of_step = policy.batches[0], [sample for sample in notes.sampled if sample.step == 1]
    assert torch.allclose(batch["rewards"], 2 * batch["environment_rewards"] - 1)
    for row, sample in enumerate(of_step):
        rewards = batch["environment_rewards"][row], batch["rewards"][row]
        assert (sample.reward, sample.shaped_reward) == rewards
        assert sample.sample_mask == batch["sample_mask"][row] == float(not sample.truncated)
        assert sample.advantage_first == batch["advantages"][row, -1]
        assert sample.advantage == pytest.approx(sample.advantage_first)
        assert sample.prompt_tokens + sample.response_tokens == batch["input_lengths"][row]
        assert (sample.weight_version_min, sample.weight_version_max) == (0, 0)
    assert len({sample.advantage_first for sample in of_step}) > 1


def test_validation_runs_at_start_by_period_and_at_end_on_held_out_prompts():
    grpo = {"max_num_steps": 5, "val_period": 2, "val_at_start": True, "val_at_end": True}
    policy, notes = run(master(grpo=grpo | {"max_val_samples": 5, "val_batch_size": 3}))
    validated = [step for step, metrics in notes.steps.items() if "validation/accuracy" in metrics]
    assert validated == [0, 2, 4, 5]
    assert policy.calls.count("validate") == 4 * 2
    assert len({notes.steps[step]["validation/reward"] for step in validated}) == 1
    assert "validation/pass_k" not in notes.steps[5], "greedy"
    assert sum(sample.of_validation for sample in notes.sampled) == 4 * 5
    assert len(notes.sampled) == 4 * 5 + 5 * 12
    assert (notes.sampled[-1].step, notes.sampled[-1].prompt[-1]) == (5, ">")


def test_a_validation_over_several_sources_tells_each(monkeypatch):
    config = master(grpo={"val_at_end": True, "max_val_samples": 5})
    drawn = source(config)
    named = [replace(prompt, source="ab"[row % 2]) for row, prompt in enumerate(drawn.validation(5))]
    monkeypatch.setattr(drawn, "validation", lambda count: named[:count])
    _, notes = run(config, prompts=drawn)
    metrics = {
        key: value for key, value in notes.steps[max(notes.steps)].items() if key.startswith("validation/")
    }
    assert {"validation/a/reward", "validation/b/reward", "validation/a/accuracy"} <= metrics.keys()
    of_both = (3 * metrics["validation/a/reward"] + 2 * metrics["validation/b/reward"]) / 5
    assert metrics["validation/reward"] == pytest.approx(of_both)


def test_a_validation_may_sample_several_answers_and_counts_prompts_with_a_reward():
    config = master(
        {"val_at_end": True, "max_val_samples": 4, "val_greedy": False, "val_num_generations_per_prompt": 3}
    )
    policy, notes = run(config)
    assert "validate" not in policy.calls, "nothing is greedy"
    answered = [sample for sample in notes.sampled if sample.of_validation]
    assert len(answered) == 12
    rewards = [sample.reward for sample in answered]
    found = notes.steps[2]
    assert found["validation/reward"] == pytest.approx(sum(rewards) / 12)
    prompts = [any(reward > 0 for reward in rewards[first : first + 3]) for first in range(0, 12, 3)]
    assert found["validation/pass_k"] == pytest.approx(sum(prompts) / 4)


@pytest.mark.parametrize(
    ("bounds", "low", "high"),
    [
        ({"advantage_clip_low": -0.1}, -0.1, None),
        ({"advantage_clip_high": 0.1}, None, 0.1),
        ({"advantage_clip_low": -0.1, "advantage_clip_high": 0.1}, -0.1, 0.1),
    ],
)
def test_advantages_are_held_between_the_bounds(bounds, low, high):
    grpo = {"num_prompts_per_step": 48}
    plain, clipped = (run(master(grpo | section))[0].batches for section in ({}, bounds))
    given = torch.cat([batch["advantages"].flatten() for batch in plain])
    assert given.min() < -0.1
    assert given.max() > 0.1
    for before, after in zip(plain, clipped, strict=True):
        assert torch.equal(after["advantages"], before["advantages"].clamp(low, high))
