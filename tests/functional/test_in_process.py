"""Runs of one rank in the driver's process, beside the same runs with Ray: equal to the bit, each resumes the other."""

import os
import signal

import pytest
from grpo_run import RECIPE, assert_same_tensors, numbers

pytestmark = pytest.mark.stage("processes")

CASES = {"grpo": "grpo_copy_cpu.yaml", "dpo": "dpo_cpu.yaml", "sft": "sft_cpu.yaml"}
WITHOUT_RAY = "import sys; sys.modules['ray'] = None; "
SAVES = ("checkpointing.enabled=true", "checkpointing.save_period=2")


def overrides(algorithm, in_process, steps):
    return (
        *("cluster.cpu_workers_per_node=1", "policy.megatron_cfg.tensor_model_parallel_size=1", *SAVES),
        *(f"cluster.in_process={in_process}", f"{algorithm}.max_num_steps={steps}"),
        f"{algorithm}.val_at_end=false",
    )


@pytest.mark.parametrize(("algorithm", "recipe"), CASES.items(), ids=CASES)
def test_a_run_without_ray_is_that_with_ray_to_the_bit_and_either_resumes_the_other(start, algorithm, recipe):
    def run(name, in_process, steps=4):
        before = WITHOUT_RAY if in_process == "auto" else ""
        given = {"algorithm": algorithm, "recipe": RECIPE.with_name(recipe), "before": before}
        one = start(name, *overrides(algorithm, in_process, steps), **given)
        one.finish()
        return one

    wanted = run("ray", "never")
    for name, first, then in (
        ("in_process", "auto", None),
        ("to", "auto", "never"),
        ("from", "never", "auto"),
    ):
        found = run(name, first, steps=2 if then else 4)
        if then:
            found = run(name, then)
        assert numbers(found) == numbers(wanted)
        assert_same_tensors(wanted.checkpoint(4), found.checkpoint(4))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_run_that_ends_amid_a_step_resumes_from_its_last_saved_one(start, number):
    wanted = start("whole", *overrides("grpo", "auto", 6))
    wanted.finish()
    cut = start("cut", *overrides("grpo", "auto", 6))
    cut.wait_for_step(3)
    os.kill(cut.process.pid, number)
    code, _, _ = cut.end(within_s=60)
    assert code == {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130}[number]
    again = start("cut", *overrides("grpo", "auto", 6))
    again.finish()
    assert numbers(again) == numbers(wanted)
    assert_same_tensors(wanted.checkpoint(6), again.checkpoint(6))
