"""The loop that the algorithms share, over fakes of an algorithm, its models and the engine."""

import math

import pytest
import torch
from algorithm_fakes import loop_run, recipe, train_result
from algorithm_fakes import run as run_to_its_end
from refusals import assert_holds

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.algorithm import join_results, rollout_metrics, train_metrics
from nemo_rl_mcore.driver.algorithms.run_checkpoints import (
    RunCheckpoints,
    SkipGuard,
    TooManySkippedStepsError,
)
from nemo_rl_mcore.driver.checkpoints import CheckpointStore
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.losses.base import MetricKind
from nemo_rl_mcore.rank.train_step import EMPTY_STEP


def run(*arguments, **options):
    """What was called, in which order, what was noted, and the models."""
    whole = loop_run(*arguments, **options)
    try:
        whole.go()
    except TooManySkippedStepsError as error:
        return whole.calls, whole.notes, whole.models, error
    return whole.calls, whole.notes, whole.models, None


def test_the_engine_has_the_weights_before_every_step_that_samples():
    calls, notes, _, _ = run()
    assert calls == ["weights 0", "step 1", "weights 1", "step 2", "weights 2", "step 3"]
    assert notes.phases == ["weight_sync"] * 2
    counts = {"train/skipped_steps": 0, "train/empty_steps": 0}
    assert notes.steps[2] == {"train/number": 2.0, "train/loss": 2.0} | counts


def test_the_engine_sleeps_through_steps_that_are_given_their_answers():
    calls, notes, _, _ = run({"val_period": 2}, algorithm="sft")
    assert calls == ["weights 0", "asleep", "step 1", "step 2", "weights 2", "validate 2", "step 3"]
    assert notes.phases == ["weight_sync", "validation"]


@pytest.mark.parametrize(
    ("loop", "validated"),
    [
        ({}, []),
        ({"val_at_start": True}, [0]),
        ({"val_period": 2}, [2]),
        ({"val_at_end": True}, [3]),
        ({"val_period": 1, "val_at_end": True, "val_at_start": True}, [0, 1, 2, 3]),
    ],
)
def test_validations_see_the_weights_of_their_step_and_happen_once(loop, validated):
    calls, notes, _, _ = run(loop)
    assert [int(call.split()[1]) for call in calls if call.startswith("validate")] == validated
    for step in validated:
        assert calls[calls.index(f"validate {step}") - 1] == f"weights {step}"
        assert notes.steps[step]["validation/number"] == step
    assert sorted(notes.steps) == sorted({*validated, 1, 2, 3})
    assert all(
        ("validation/number" in metrics) == (step in validated) for step, metrics in notes.steps.items()
    )


def checkpoints(tmp_path, **keys):
    return RunCheckpoints(CheckpointStore(tmp_path), last_step=3, recipe="seed: 1\n", **keys)


def test_a_checkpoint_holds_every_model_the_recipe_the_metrics_and_the_counters(tmp_path):
    calls, notes, _, _ = run(
        {"val_period": 2}, checkpoints(tmp_path, save_period=2), {2: ["the loss is nan", None, EMPTY_STEP]}
    )
    assert [call for call in calls if call.startswith("save")] == ["save policy", "save value"] * 2
    second, third = CheckpointStore(tmp_path).checkpoints()
    assert (second.step, third.step) == (2, 3), "by period, and at the end"
    for name in ("policy", "value"):
        assert (second.folder / name / "weights").is_file()
    assert (second.folder / "config.yaml").read_text() == "seed: 1\n"
    assert second.metrics == notes.steps[2]
    assert second.metrics["train/skipped_steps"] == second.metrics["train/empty_steps"] == 1
    assert (second.counters["total"], second.counters["empty"]) == (1, 1)
    assert notes.phases[-1] == "checkpoint"


def test_a_run_goes_on_after_the_step_of_its_checkpoint(tmp_path):
    run({}, checkpoints(tmp_path), {2: ["the loss is nan"]})
    start = CheckpointStore(tmp_path).checkpoints()[1]
    calls, notes, models, _ = run({"val_at_start": True, "max_num_steps": 4}, RunCheckpoints(start=start))
    assert calls[:2] == ["load policy", "load value"]
    assert calls[2:] == ["weights 2", "step 3", "weights 3", "step 4"], "no validation at step 0"
    assert models["value"].loaded == "0"
    assert notes.steps[3]["train/skipped_steps"] == 1, "counted on"


def test_a_run_that_is_at_its_last_step_does_nothing_more(tmp_path):
    run({}, checkpoints(tmp_path))
    start = next(CheckpointStore(tmp_path).newest_first())
    calls, notes, _, _ = run({"val_at_end": True}, RunCheckpoints(start=start))
    assert calls == ["load policy", "load value", "weights 3"]
    assert notes.steps == {}


def test_steps_skipped_in_a_row_end_the_run_after_they_are_noted_and_before_they_are_saved(tmp_path):
    broken = {step: ["the loss is nan"] for step in (2, 3)}
    calls, notes, _, error = run({"max_num_steps": 9}, checkpoints(tmp_path), broken, max_consecutive_skips=2)
    assert isinstance(error, TooManySkippedStepsError)
    assert_holds(str(error), "step 3: ", 2, [7])
    assert notes.steps[3]["train/skipped_steps"] == 2
    assert calls[-1] == "step 3"
    assert next(CheckpointStore(tmp_path).newest_first()).step == 2


def test_the_row_of_skipped_steps_goes_on_after_a_resume(tmp_path):
    run({}, checkpoints(tmp_path), {2: ["the loss is nan"]}, max_consecutive_skips=2)
    start = CheckpointStore(tmp_path).checkpoints()[1]
    _, _, _, error = run({}, RunCheckpoints(start=start), {3: ["the loss is nan"]}, max_consecutive_skips=2)
    assert isinstance(error, TooManySkippedStepsError)
    assert_holds(str(error), "step 3: ", 2)


@pytest.mark.parametrize(
    ("algorithm", "section"),
    [
        *((name, {}) for name in ("grpo", "ppo", "dpo", "sft", "distillation")),
        ("grpo", {"use_dynamic_sampling": True}),
        ("dpo", {"num_generations_per_prompt": 2}),
        ("distillation", {"on_policy": False, "num_generations_per_prompt": 1}),
    ],
)
def test_ranks_and_engine_take_turns(algorithm, section):
    """They may share their GPUs: the engine answers awake, is put to sleep once, and sleeps while ranks compute."""
    validated = {"val_period": 2, "val_at_start": True, "val_at_end": True, "max_val_samples": 2}
    penalty = {"loss_fn": {"reference_policy_kl_penalty": 0.1}} if algorithm in ("grpo", "ppo") else {}
    loop = {"max_num_steps": 3} | validated | section
    calls = run_to_its_end(recipe(algorithm, **{algorithm: loop}, **penalty)).policy.calls
    assert calls.count("train") == 3
    awake = False
    for number, call in enumerate(calls):
        match call:
            case "update_weights":
                awake = True
            case "offload":
                assert awake, f"asleep already: call {number} of {calls}"
                awake = False
            case _:
                assert awake == (call in ("generate", "validate")), f"call {number} of {calls}"


# What becomes of steps that are skipped


NAN = "the loss is nan"


def batch(rewards=(1.0, 0.0, 1.0), **columns):
    return BatchedDataDict(
        prompt_index=torch.tensor([5, 5, 9]),
        sample_index=torch.tensor([0, 1, 0]),
        rewards=torch.tensor(rewards),
        advantages=torch.zeros(3, 4),
        **columns,
    )


def stopped(limit, reasons, **given):
    guard = SkipGuard(limit)
    guard.record(reasons)
    with pytest.raises(TooManySkippedStepsError) as caught:
        guard.stop_if_too_many(12, batch(**given))
    return str(caught.value)


def test_the_run_goes_on_until_the_limit_of_skips_in_a_row():
    guard = SkipGuard(limit=3)
    for reasons in ([NAN], [NAN, None], [NAN], [NAN]):
        guard.record(reasons)
        guard.stop_if_too_many(1, batch())
    assert (guard.total, guard.in_a_row) == (4, 2)
    message = stopped(3, [None, NAN, NAN, "the gradient norm is inf"])
    assert_holds(message, "step 12", 3, "max_consecutive_skips: 3", "inf")


def test_an_empty_step_neither_counts_nor_breaks_the_row():
    guard = SkipGuard(limit=2)
    guard.record([NAN, EMPTY_STEP, EMPTY_STEP, EMPTY_STEP])
    guard.stop_if_too_many(1, batch())
    assert (guard.total, guard.empty, guard.in_a_row) == (1, 3, 1)


def test_the_samples_that_are_not_finite_are_named_with_the_field_and_else_the_weights_are_blamed():
    """A teacher that names the whole vocabulary leaves no mass, which is not wrong."""
    no_mass = {"teacher_tail_logmass": torch.full((3, 4), -torch.inf)}
    for columns in ({}, no_mass):
        message = stopped(1, [NAN], rewards=(1.0, float("nan"), 1.0), **columns)
        assert_holds(message, "prompt 5 ", "sample 1 (rewards)")
        assert "sample 0" not in message
        assert "teacher_tail_logmass" not in message
        assert_holds(stopped(1, [NAN], **columns), "the weights", [5, 9])


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_mass_that_is_no_logarithm_is_blamed(wrong):
    tail = torch.full((3, 4), -torch.inf)
    tail[2, 1] = wrong
    assert "sample 0 (teacher_tail_logmass)" in stopped(1, [NAN], teacher_tail_logmass=tail)
    named = stopped(1, [NAN], prev_logprobs=tail)
    assert "sample 0 (prev_logprobs)" in named


# The numbers of a step, of one result or several


def test_one_result_joined_is_itself():
    result = train_result()
    joined = join_results([result])
    assert torch.equal(joined.pop("grad_norm"), result.pop("grad_norm"))
    assert joined == result


def test_results_are_joined_in_order_as_if_one_call_had_made_all_steps():
    first, second = train_result(), train_result(("the loss is nan", None))
    second["all_mb_metrics"] |= {"loss": [9.0, 5.0], "global_valid_toks": [20.0, 40.0], "lr": [0.2, 0.1]}
    joined = join_results([first, second])
    assert joined["all_mb_metrics"]["loss"] == [0.5, 1.5, 9.0, 5.0]
    assert joined["grad_norm"].tolist() == [1, 2, 1, 2]
    assert joined["skip_reasons"] == [None, None, "the loss is nan", None]
    assert joined["update_successful"] is False
    metrics = train_metrics(joined, "value")
    assert metrics["value/loss"] == pytest.approx((0.5 * 30 + 1.5 * 10 + 9 * 20 + 5 * 40) / 100)
    assert metrics["value/lr"] == 0.1
    assert metrics["value/num_valid_samples"] == 80
    assert (metrics["value/probs_ratio_min"], metrics["value/probs_ratio_max"]) == (0.25, 3.0)
    assert metrics["value/update_successful"] == 0


@pytest.mark.parametrize(
    ("kind", "there", "expected"),
    [
        (MetricKind.MIN, [4.0, 2.0], 2.0),
        (MetricKind.MAX, [4.0, 2.0], 4.0),
        (MetricKind.NONE, [4.0, 2.0], 6.0),
    ],
)
@pytest.mark.parametrize("missing_first", [True, False])
def test_a_metric_that_one_result_lacks_changes_nothing_there(kind, there, expected, missing_first):
    has, lacks = train_result(), train_result()
    has["all_mb_metrics"]["extra"], has["metric_kinds"]["extra"] = there, kind
    joined = join_results([lacks, has] if missing_first else [has, lacks])
    assert len(joined["all_mb_metrics"]["extra"]) == 4
    assert train_metrics(joined)["train/extra"] == expected


def test_the_extrema_of_nothing_and_the_norms_of_empty_steps_are_left_out():
    result = train_result((None, EMPTY_STEP))
    metrics = train_metrics(result)
    assert "train/values_min" not in metrics
    assert metrics["train/grad_norm"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    assert train_metrics(train_result((EMPTY_STEP, EMPTY_STEP)))["train/grad_norm"] == 0


def test_the_spread_of_rewards_is_told_over_all_and_within_groups():
    batch = BatchedDataDict(
        rewards=torch.tensor([9.0, 9.0, 9.0, 9.0]),
        environment_rewards=torch.tensor([0.0, 1.0, 2.0, 2.0]),
        prompt_index=torch.tensor([5, 5, 7, 7]),
        token_mask=torch.tensor([[0.0, 1, 0], [0, 1, 1], [0, 1, 0], [0, 1, 1]]),
        input_lengths=torch.tensor([2, 3, 2, 3]),
        finished=torch.tensor([True, True, True, False]),
    )
    found = rollout_metrics(Rollout(batch, [], []))
    spread = {name: found[f"train/reward_{name}"] for name in ("min", "max", "std", "std_within_groups")}
    assert spread == pytest.approx(
        {"min": 0, "max": 2, "std": math.sqrt(2.75 / 3), "std_within_groups": math.sqrt(0.5) / 2}
    )
    assert (found["train/max_gen_tokens_per_sample"], found["train/mean_gen_tokens_per_sample"]) == (2, 1.5)
    assert found["train/truncation_rate"] == 0.25


def test_the_memory_of_each_model_is_told_under_its_name():
    result = train_result() | {"peak_memory_gib": 1.5}
    assert train_metrics(result)["performance/peak_memory_gib"] == 1.5
    assert train_metrics(result, "value")["performance/value_peak_memory_gib"] == 1.5
