"""`nemo-rl-mcore grpo` with asynchronous rollouts: equal to the synchronous run at age 0, stopped and resumed."""

import os
import signal
import time

import pytest
from grpo_run import RECIPE, assert_same_tensors, compared, teacher
from refusals import assert_holds

pytestmark = pytest.mark.stage("processes")

BESIDE = ("grpo.async_grpo.enabled=true", "policy.generation.colocated.enabled=false")
TIS = (
    "loss_fn.use_importance_sampling_correction=true",
    *("loss_fn.truncated_importance_sampling_type=tis", "loss_fn.truncated_importance_sampling_ratio=2.0"),
)
OVERLAP = ("policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce=true",)
# Ranks that share sequences sample by another way than an engine; here both runs have one.
SHARED = (
    "policy.megatron_cfg.context_parallel_size=2",
    "policy.megatron_cfg.fused_linear_logprobs_context_parallel=true",
    "policy.generation.colocated.enabled=false",
)


def equal_at_age_0(start, algorithm, steps, common, models=("policy",), recipe=RECIPE):
    """Run asynchronously at age 0 and synchronously, see that both are one to the bit, and return the rows."""
    section = f"{algorithm}.async_{algorithm}"
    common = (
        *(f"{algorithm}.max_num_steps={steps}", f"checkpointing.save_period={steps}"),
        *("checkpointing.enabled=true", *common),
    )
    turns = (f"{section}.enabled=false", "policy.generation.colocated.enabled=true")
    beside = (
        *(f"{section}.enabled=true", "policy.generation.colocated.enabled=false"),
        f"{section}.max_trajectory_age_steps=0",
    )
    found = []
    for name, how in (("turns", turns), ("beside", beside)):
        # Ranks that share rows sample by another way than an engine, which then both runs have.
        both = how if SHARED[0] not in common else (*how, SHARED[-1])
        run = start(name, *common, *both, algorithm=algorithm, recipe=recipe)
        run.finish()
        found.append((compared(run), {model: run.checkpoint(steps, model) for model in models}))
    assert {row["async/age_max"] for row in run.steps()} == {0}
    (rows, wanted), (others, tensors) = found
    assert [row["step"] for row in rows] == [*range(1, steps + 1)]
    assert rows == others
    for model in models:
        assert {name.split()[0] for name in wanted[model]} >= {"weights", "optimizer"}
        assert_same_tensors(wanted[model], tensors[model])
    return rows


@pytest.mark.parametrize(
    ("steps", "ranks", "correction"),
    [
        (5, 1, TIS),
        pytest.param(5, 2, (*TIS, "policy.train_global_batch_size=64"), marks=pytest.mark.exhaustive),
        pytest.param(20, 1, TIS, marks=pytest.mark.nightly),
        pytest.param(20, 2, (), marks=pytest.mark.nightly),
        pytest.param(5, 2, ("grpo.use_dynamic_sampling=true",), marks=pytest.mark.exhaustive),
        pytest.param(5, 2, OVERLAP, marks=pytest.mark.nightly),
        pytest.param(5, 2, SHARED, marks=pytest.mark.nightly),
    ],
    ids=[
        "short",
        "four-optimizer-steps",
        "one-rank-tis",
        "two-ranks",
        "dynamic-sampling",
        "two-ranks-overlap",
        "two-ranks-share-rows",
    ],
)
def test_at_age_0_a_run_is_the_synchronous_one_to_the_bit(start, steps, ranks, correction):
    common = (
        *("grpo.val_period=2", "grpo.max_val_samples=16", "loss_fn.reference_policy_kl_penalty=0.05"),
        *(f"cluster.cpu_workers_per_node={ranks}", *correction),
    )
    rows = equal_at_age_0(start, "grpo", steps, common)
    assert {"train/loss", "train/grad_norm", "train/reward", "train/kl_penalty"} <= rows[0].keys()
    assert "validation/accuracy" in rows[1]


@pytest.mark.parametrize(
    ("algorithm", "models"),
    [
        pytest.param("ppo", ("policy", "value"), marks=pytest.mark.exhaustive),
        pytest.param("dpo", ("policy",), marks=pytest.mark.nightly),
        pytest.param("distillation", ("policy",), marks=pytest.mark.nightly),
    ],
)
def test_so_are_runs_of_every_algorithm(start, tmp_path, algorithm, models):
    learns_from = (teacher(tmp_path),) if algorithm == "distillation" else ()
    common = (f"{algorithm}.val_at_end=false", *learns_from)
    equal_at_age_0(start, algorithm, 5, common, models, RECIPE.with_name(f"{algorithm}_async_cpu.yaml"))


@pytest.mark.exhaustive_cases("asynchronous")
@pytest.mark.parametrize("how", [(), (*BESIDE, *TIS)], ids=["synchronous", "asynchronous"])
def test_a_stop_does_not_wait_for_a_rank_that_hangs_and_says_what_is_lost(start, how):
    run = start(
        "run", "grpo.max_num_steps=500", "checkpointing.enabled=true", "checkpointing.save_period=99999", *how
    )
    run.wait_for_step(3)
    ranks = [pid for pid, title in run.watch.alive().items() if "MegatronPolicyWorker" in title]
    os.kill(ranks[-1], signal.SIGSTOP)
    run.process.send_signal(signal.SIGTERM)
    stopped_at = time.monotonic()
    code, _, errors = run.end(within_s=30)
    # 3 s until the rank is given up; then the others end, and the report is written. All deadlines are minutes.
    assert time.monotonic() - stopped_at < 20
    assert code == 143, errors
    told = " ".join(errors.split())
    assert told.startswith("terminated; ")
    assert_holds(told, f"1 to {len(run.steps())} are lost", "policy rank ", "process is stopped")
    assert run.watch.all_gone(within_s=10)
