"""The loop that the algorithms share, over fakes of an algorithm, its models and the engine."""

import pytest
from loop_fakes import loop_run
from refusals import assert_holds

from nemo_rl_mcore.driver.algorithms.run_checkpoints import RunCheckpoints, TooManySkippedStepsError
from nemo_rl_mcore.driver.checkpoints import CheckpointStore
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
    assert notes.steps[2] == {
        "train/number": 2.0,
        "train/loss": 2.0,
        "train/skipped_steps": 0,
        "train/empty_steps": 0,
    }


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


def test_without_a_store_nothing_is_saved():
    calls, _, _, _ = run()
    assert not [call for call in calls if call.startswith(("save", "load"))]


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
