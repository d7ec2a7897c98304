"""Runs without the pass before training, beside runs with it: equal to the bit where microbatches are equal."""

from pathlib import Path

import pytest
from grpo_run import Run

CONFIGS = Path(__file__).parents[2] / "examples/configs"
TWO_STEPS = ("logger.tensorboard_enabled=false", "policy.megatron_cfg.optimizer.lr=0.01")
OF_THE_MACHINE = ("timing/", "performance/")
PACE = ("async/trainer_idle", "async/engine_idle", "async/buffer_ready", "async/inflight")


def steps_of(folder, recompute, recipe, *overrides, algorithm="grpo"):
    run = Run(
        folder / recompute,
        *(f"{algorithm}.max_num_steps=3", f"{algorithm}.val_at_end=false", *TWO_STEPS),
        *(f"policy.recompute_prev_logprobs={recompute}", *overrides),
        algorithm=algorithm,
        recipe=CONFIGS / recipe,
    )
    try:
        code, _, errors = run.end(within_s=240)
    finally:
        run.close()
    assert code == 0, errors
    return run.steps(), errors.splitlines()


def compare(run, other):
    """The runs have equal numbers, and have warned alike."""
    (steps, warnings), (wanted, warned) = run, other
    assert warnings == warned
    assert len(steps) == len(wanted) == 3
    for found, expected in zip(steps, wanted, strict=True):
        names = {name for name in expected if not name.startswith((*OF_THE_MACHINE, *PACE))}
        assert names == {name for name in found if not name.startswith((*OF_THE_MACHINE, *PACE))}
        for name in names:
            assert found[name] == expected[name], name


THRESHOLD = "policy.generation.mismatch_threshold=1.0000001"
CASES = {
    "grpo": ("grpo", "grpo_copy_cpu.yaml", 64, (THRESHOLD,)),
    "ppo": ("ppo", "ppo_cpu.yaml", 128, ()),
    "several turns": (
        "grpo",
        "grpo_guess_number_cpu.yaml",
        128,
        ("loss_fn.reference_policy_kl_penalty=0.05",),
    ),
    "asynchronous, K = 0": (
        *("grpo", "grpo_copy_async_cpu.yaml", 128),
        ("grpo.async_grpo.max_trajectory_age_steps=0", "cluster.cpu_workers_per_node=1"),
    ),
}


@pytest.mark.exhaustive_cases("grpo")
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_to_the_bit(tmp_path, case):
    algorithm, recipe, rows, overrides = CASES[case]
    sizes = (f"policy.train_micro_batch_size={rows}", f"policy.logprob_batch_size={rows}")
    found, wanted = (
        steps_of(tmp_path, how, recipe, *sizes, *overrides, algorithm=algorithm) for how in ("auto", "always")
    )
    assert len(wanted[1]) == 3 or THRESHOLD not in overrides
    compare(found, wanted)
