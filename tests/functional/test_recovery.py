"""A run whose ranks die on the way ends as the run in which none died, bit for bit; see also the kill table."""

import os
import signal
from dataclasses import dataclass
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
SMALL_GRPO = (
    *("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=8", "grpo.val_at_end=false"),
    *("policy.train_global_batch_size=64", "policy.train_micro_batch_size=32"),
)
TWO_RANKS = "cluster.cpu_workers_per_node=2"


@dataclass(frozen=True)
class Case:
    """A recipe, and which of its ranks dies, counted in the order in which they started; -1 is the last one."""

    name: str
    algorithm: str
    recipe: str
    overrides: tuple[str, ...] = ()
    dies: int = -1


CASES = [
    Case(
        "reference and pipeline",
        "grpo",
        "grpo_copy_cpu.yaml",
        (
            *(*SMALL_GRPO, TWO_RANKS, "loss_fn.reference_policy_kl_penalty=0.05"),
            "policy.megatron_cfg.pipeline_model_parallel_size=2",
        ),
        dies=0,
    ),
    Case(
        "engine of its own, token batches",
        "grpo",
        "grpo_copy_cpu.yaml",
        (
            *(*SMALL_GRPO, TWO_RANKS, "policy.generation.colocated.enabled=false"),
            *("policy.dynamic_batching.enabled=true", "policy.dynamic_batching.train_mb_tokens=256"),
            "policy.dynamic_batching.logprob_mb_tokens=256",
        ),
    ),
    Case(
        "several optimizer steps",
        "grpo",
        "grpo_copy_cpu.yaml",
        (*SMALL_GRPO, TWO_RANKS, "policy.train_global_batch_size=16", "policy.train_micro_batch_size=8"),
    ),
    Case("sft", "sft", "sft_cpu.yaml"),
]


def run_of(case: Case, folder: Path) -> Run:
    return Run(
        folder,
        f"{case.algorithm}.max_num_steps={STEPS}",
        f"checkpointing.checkpoint_dir={folder}/checkpoints",
        *COMMON,
        *case.overrides,
        algorithm=case.algorithm,
        recipe=RECIPES / case.recipe,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_no_checkpoint_holds_is_done_again_from_the_same_rows(tmp_path: Path, case: Case) -> None:
    undisturbed, struck = run_of(case, tmp_path / "undisturbed"), None
    try:
        assert undisturbed.end(within_s=300)[0] == 0
        struck = run_of(case, tmp_path / "struck")
        struck.wait_for_step(KILLED_AFTER, within_s=240)
        os.kill(sorted(struck.ranks())[case.dies], signal.SIGKILL)
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
