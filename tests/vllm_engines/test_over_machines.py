"""A run whose engine is on two machines: two in name, each a raylet of this one, with a process of vLLM each."""

import os
import signal
from pathlib import Path

import pytest
from grpo_run import RECIPE, Run
from raylets import Raylets
from refusals import assert_holds

pytestmark = pytest.mark.nightly
STEPS, STRUCK_AFTER = 4, 2
SMALL = (
    *(f"grpo.max_num_steps={STEPS}", "grpo.val_at_end=false", "logger.tensorboard_enabled=false"),
    *("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4"),
    *("policy.train_global_batch_size=16", "policy.train_micro_batch_size=8", "policy.logprob_batch_size=8"),
    *("cluster.num_nodes=2", "cluster.cpu_workers_per_node=1"),
    *(f"policy.generation.vllm_cfg.{key}" for key in ("max_restarts=1", "restart_backoff_s=0.1")),
    "policy.generation.vllm_cfg.start_timeout_s=900",
)


@pytest.mark.parametrize("cut", ["tensor_parallel_size=2"])
def test_an_engine_over_two_machines_answers_is_refitted_and_starts_anew_as_one(tmp_path: Path, cut: str):
    """Log-probabilities of the whole vocabulary at the start, digests after each refit, the mismatch of each step.

    A process of vLLM on the second machine is killed in between: the engine on the first one ends with it.
    """
    recipe = RECIPE.with_name("grpo_copy_vllm_cpu.yaml")
    with Raylets() as raylets, pytest.MonkeyPatch.context() as patch:
        raylets.join()
        for key, value in raylets.environment.items():
            patch.setenv(key, value)
        run = Run(tmp_path / "run", *SMALL, f"policy.generation.vllm_cfg.{cut}", recipe=recipe)
        try:
            run.wait_for_step(STRUCK_AFTER, within_s=900)
            os.kill(process_of_share(raylets), signal.SIGKILL)
            code, output, errors = run.end(within_s=900)
        finally:
            run.close()
    assert code == 0, errors
    assert_holds(
        output + errors, "engine and training agree on", "vLLM engine 0 starts anew", "0 restarts left"
    )
    rows = run.steps()
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert max(row["mismatch/max_seq_mult_prob_error"] for row in rows) < 1.0001


def process_of_share(raylets: Raylets) -> int:
    """The process of vLLM below the actor of the second machine."""
    alive = raylets.processes()
    [share] = [pid for pid, title in alive.items() if title.startswith("ray::VllmShare")]
    [worker] = [pid for pid, title in alive.items() if title.startswith("VLLM::") and parent_of(pid) == share]
    return worker


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def in_two_stages(folder: Path):
    """How far answers are from those of transformers, and what a refit says whose last norm one stage has wrong."""
    import engine_process as tiny

    from nemo_rl_mcore.generation.engine import Sampling
    from nemo_rl_mcore.generation.refit.digests import digests
    from nemo_rl_mcore.generation.refit.verification import IncompleteRefitError
    from nemo_rl_mcore.generation.vllm.engine import VllmEngine

    engine = VllmEngine(tiny.settings(tiny.model_folder(folder, tied=True), pipeline_parallel_size=2))
    model = tiny.transformers_model(folder, 0)
    tiny.refit(engine, model, 1)
    asked = tiny.requests()
    error = tiny.largest_error(model, asked, engine.generate(asked, Sampling(max_new_tokens=8), 1), 1.0)
    engine.begin_refit(2)
    for message in tiny.messages(tiny.weights(model)):
        engine.load_bucket(message)
    engine._llm.collective_rpc(double_the_last_norm)
    try:
        engine.finish_refit(2, digests(tiny.weights(model)))
    except IncompleteRefitError as refused:
        return error, str(refused)
    finally:
        engine.shutdown()
    return error, "accepted"


def double_the_last_norm(worker):
    if worker.rank == 1:
        worker.model_runner.get_model().model.norm.weight.data.mul_(2)


def test_an_engine_in_two_stages_answers_and_says_which_tensor_one_of_them_has_wrong(
    engine_process, tmp_path
):
    [(error, told)] = engine_process.run(in_two_stages, tmp_path / "model")
    assert error < 1e-4
    assert told == "of 20 tensors 1 not as they were sent: model.norm.weight"
