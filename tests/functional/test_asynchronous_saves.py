"""Whole runs that save in the background: each checkpoint is the one that a run which waits for it writes."""

from pathlib import Path

import pytest
from grpo_run import RECIPE, Run, assert_same_tensors

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
    output = run.finish(within_s=240)
    for step in range(1, STEPS + 1):
        assert output.count(f"checkpoint saved: step {step}\n") == 1
    return {step: run.checkpoint(step) for step in range(1, STEPS + 1)}


@pytest.mark.exhaustive
def test_checkpoints_are_those_of_a_run_that_waits_for_them(tmp_path: Path) -> None:
    one, other = (saved(tmp_path / str(how), "grpo_copy_cpu.yaml", background=how) for how in (True, False))
    for step, tensors in one.items():
        assert_same_tensors(other[step], tensors)
