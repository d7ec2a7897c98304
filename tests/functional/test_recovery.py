"""A run whose ranks die on the way ends as the run in which none died, bit for bit; see also the kill table."""

import os
import signal
from pathlib import Path

import pytest
from grpo_run import Run, assert_same_tensors, numbers
from refusals import assert_holds

RECIPES = Path(__file__).parents[2] / "examples/configs"
STEPS, PERIOD, KILLED_AFTER = 7, 3, 5
COMMON = (
    *("checkpointing.enabled=true", f"checkpointing.save_period={PERIOD}", "checkpointing.keep_top_k=1"),
    *("logger.tensorboard_enabled=false", "cluster.max_trainer_restarts=1"),
)
PIPELINE = (
    *("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=8", "grpo.val_at_end=false"),
    *("policy.train_global_batch_size=16", "policy.train_micro_batch_size=8"),
    *("cluster.cpu_workers_per_node=2", "policy.megatron_cfg.pipeline_model_parallel_size=2"),
    "loss_fn.reference_policy_kl_penalty=0.05",
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("algorithm", "recipe", "overrides", "dies"),
    [("grpo", "grpo_copy_cpu.yaml", PIPELINE, 0), ("sft", "sft_cpu.yaml", (), -1)],
    ids=["reference and pipeline", "sft"],
)
def test_steps_behind_a_checkpoint_are_trained_again_from_the_same_rows(
    tmp_path: Path, algorithm: str, recipe: str, overrides: tuple[str, ...], dies: int
) -> None:
    """dies: which rank, in the order of their starts."""

    def run_in(folder: Path) -> Run:
        length = (f"{algorithm}.max_num_steps={STEPS}", f"checkpointing.checkpoint_dir={folder}/checkpoints")
        return Run(folder, *length, *COMMON, *overrides, algorithm=algorithm, recipe=RECIPES / recipe)

    undisturbed, struck = run_in(tmp_path / "undisturbed"), None
    try:
        assert undisturbed.end(within_s=300)[0] == 0
        struck = run_in(tmp_path / "struck")
        struck.wait_for_step(KILLED_AFTER, within_s=240)
        os.kill(sorted(struck.ranks())[dies], signal.SIGKILL)
        code, _, errors = struck.end(within_s=300)
        assert code == 0, errors
        assert_holds(errors, "step 3, 0 left (cluster.max_trainer_restarts)", "trained again")
        assert "differ" not in errors
        assert numbers(struck, "recovery/") == numbers(undisturbed, "recovery/")
        assert struck.steps()[-1]["recovery/restarts"] == 1
        assert_same_tensors(undisturbed.checkpoint(STEPS), struck.checkpoint(STEPS))
    finally:
        undisturbed.close()
        if struck is not None:
            struck.close()
