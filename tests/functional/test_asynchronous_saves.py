"""Whole runs that save in the background: each checkpoint is the one that a run which waits for it writes."""

from pathlib import Path

import pytest
from checkpoint_tensors import tensors_in
from grpo_run import RECIPE, Run

STEPS = 4
SMALL = (
    *(f"grpo.max_num_steps={STEPS}", "grpo.val_at_end=false", "logger.tensorboard_enabled=false"),
    *("checkpointing.enabled=true", "checkpointing.save_period=1", "checkpointing.keep_top_k=null"),
)


def saved(folder: Path, recipe: str, *, background: bool) -> dict:
    """The tensors of each step's checkpoint."""
    key = f"policy.megatron_cfg.checkpoint.async_save={background}"
    given = (f"checkpointing.checkpoint_dir={folder}/checkpoints", key)
    run = Run(folder, *SMALL, *given, recipe=RECIPE.with_name(recipe))
    try:
        code, output, errors = run.end(within_s=240)
    finally:
        run.close()
    assert (code, errors) == (0, "")
    for step in range(1, STEPS + 1):
        assert output.count(f"checkpoint saved: step {step}\n") == 1
    return {step: tensors_in(folder / f"checkpoints/step_{step}/policy") for step in range(1, STEPS + 1)}


@pytest.mark.exhaustive
def test_checkpoints_are_those_of_a_run_that_waits_for_them(tmp_path: Path) -> None:
    one, other = (
        saved(tmp_path / str(background), "grpo_copy_cpu.yaml", background=background)
        for background in (True, False)
    )
    for step, tensors in one.items():
        assert tensors.keys() == other[step].keys()
        assert all(tensor.equal(other[step][name]) for name, tensor in tensors.items())


@pytest.mark.exhaustive
def test_an_asynchronous_run_saves_in_the_background(tmp_path: Path) -> None:
    assert saved(tmp_path, "grpo_copy_async_cpu.yaml", background=True).keys() == {*range(1, STEPS + 1)}
