"""The loop that the algorithms share, over fakes of an algorithm, its models and the engine."""

from dataclasses import dataclass, field

import pytest
import torch
from algorithm_fakes import FakeModel, Notes, recipe

from nemo_rl_mcore.algorithms.loop import StepOutcome, TrainingLoop
from nemo_rl_mcore.algorithms.run_checkpoints import RunCheckpoints
from nemo_rl_mcore.algorithms.skip_guard import TooManySkippedStepsError
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.training.checkpoints import CheckpointStore
from nemo_rl_mcore.training.train_step import EMPTY_STEP

BATCH = BatchedDataDict(
    rewards=torch.tensor([1.0]), prompt_index=torch.tensor([7]), sample_index=torch.tensor([0])
)


@dataclass
class FakeAlgorithm:
    """Reports the number of its step, and as many optimizer steps as `reasons` has for it."""

    calls: list[str]
    reasons: dict[int, list[str | None]] = field(default_factory=dict)

    def step(self, step):
        self.calls.append(f"step {step}")
        return StepOutcome({"train/number": float(step)}, self.reasons.get(step, [None]), BATCH)

    def validate(self, step):
        self.calls.append(f"validate {step}")
        return {"validation/number": float(step)}


class FakeEngine:
    def __init__(self, calls):
        self.calls = calls

    def update_weights(self, version):
        self.calls.append(f"weights {version}")


def run(loop=None, checkpoints=None, reasons=None, **top):
    """What was called, in which order, what was noted, and the models."""
    calls, notes = [], Notes()
    config = recipe("sft", sft={"max_num_steps": 3} | (loop or {}), **top)
    models = {"policy": FakeModel(calls, "policy"), "value": FakeModel(calls, "value")}
    algorithm = FakeAlgorithm(calls, reasons or {})
    whole = TrainingLoop(config, models, FakeEngine(calls), notes, checkpoints or RunCheckpoints())
    try:
        whole.run(algorithm)
    except TooManySkippedStepsError as error:
        return calls, notes, models, error
    return calls, notes, models, None


def test_the_engine_has_the_weights_before_the_first_step_and_after_every_one():
    calls, notes, _, _ = run()
    assert calls == ["weights 0", "step 1", "weights 1", "step 2", "weights 2", "step 3", "weights 3"]
    assert notes.phases == ["weight_sync"] * 3
    assert notes.steps[2] == {"train/number": 2.0, "train/skipped_steps": 0, "train/empty_steps": 0}


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
    assert calls[2:] == ["weights 2", "step 3", "weights 3", "step 4", "weights 4"], "no validation at step 0"
    assert models["value"].loaded == "0"
    assert notes.steps[3]["train/skipped_steps"] == 1, "counted on"


def test_a_run_that_is_at_its_last_step_does_nothing_more(tmp_path):
    run({}, checkpoints(tmp_path))
    start = CheckpointStore(tmp_path).latest()
    calls, notes, _, _ = run({"val_at_end": True}, RunCheckpoints(start=start))
    assert calls == ["load policy", "load value", "weights 3"]
    assert notes.steps == {}


def test_steps_skipped_in_a_row_end_the_run_after_they_are_noted_and_before_they_are_saved(tmp_path):
    broken = {step: ["the loss is nan"] for step in (2, 3)}
    calls, notes, _, error = run({"max_num_steps": 9}, checkpoints(tmp_path), broken, max_consecutive_skips=2)
    assert "step 3: the optimizer step was skipped 2 times in a row" in str(error)
    assert "its prompts are [7]" in str(error)
    assert notes.steps[3]["train/skipped_steps"] == 2
    assert calls[-1] == "weights 3"
    assert CheckpointStore(tmp_path).latest().step == 2


def test_the_row_of_skipped_steps_goes_on_after_a_resume(tmp_path):
    run({}, checkpoints(tmp_path), {2: ["the loss is nan"]}, max_consecutive_skips=2)
    start = CheckpointStore(tmp_path).checkpoints()[1]
    _, _, _, error = run({}, RunCheckpoints(start=start), {3: ["the loss is nan"]}, max_consecutive_skips=2)
    assert "skipped 2 times in a row" in str(error)
