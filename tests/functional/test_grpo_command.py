"""`nemo-rl-mcore grpo` as a person runs it: a short run, a rank that dies, Ctrl-C or SIGTERM, numbers that explode."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpo_run import Run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[type[Run]]:
    started: list[Run] = []

    class Started(Run):
        def __init__(self, *overrides: str) -> None:
            super().__init__(tmp_path / "run", *overrides)
            started.append(self)

    yield Started  # type: ignore[misc]
    for run in started:
        run.watch.kill_all()
        run.process.wait()
        for pipe in (run.process.stdout, run.process.stderr):
            assert pipe is not None
            pipe.close()


def test_a_short_run_leaves_metrics_curves_and_samples(start) -> None:
    run = start(
        *("grpo.max_num_steps=3", "loss_fn.reference_policy_kl_penalty=0.01"),
        *("policy.train_micro_batch_size=32", "policy.train_global_batch_size=128"),
    )
    code, output, errors = run.end(within_s=180)
    assert (code, errors) == (0, "")
    assert "step 3/3" in output
    assert "validation/accuracy" in output
    steps = run.steps()
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        # Two optimizer steps a rollout: generation and training agree on the log-probabilities of both.
        assert step["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
        assert step["train/global_valid_seqs"] == 256
        assert step["train/skipped_steps"] == 0
        assert step["train/kl_penalty"] is not None
        assert {
            "timing/generation",
            "timing/logprobs",
            "timing/train",
            "performance/tokens_per_sec",
        } <= step.keys()
    assert (run.log_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((run.log_dir / "tensorboard").glob("events*"))
    samples = [json.loads(line) for line in (run.log_dir / "samples.jsonl").read_text().splitlines()]
    assert {"prompt", "answer", "response", "reward"} <= samples[0].keys()
    assert run.watch.all_gone(within_s=10)


def test_a_killed_rank_ends_the_run_with_one_error_that_names_it(start) -> None:
    run = start("grpo.max_num_steps=100000")
    run.wait_for_step(2)
    ranks = run.ranks()
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    killed = time.monotonic()
    code, output, errors = run.end(within_s=15)
    assert time.monotonic() - killed < 15
    assert code == 1
    assert errors.count("the run stopped: rank ") == 1
    assert f"pid {ranks[0]}) died in " in errors
    assert "Traceback" not in errors
    assert run.watch.all_gone(within_s=10)
    finished = run.steps()
    assert len(finished) >= 2
    assert (run.log_dir / "curves.png").exists(), "the report covers the finished steps"
    assert f"{len(finished)} steps" in output


@pytest.mark.quick_cases("2-130-interrupted")
@pytest.mark.parametrize(
    ("stop", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_ctrl_c_and_sigterm_stop_cleanly_and_keep_the_finished_steps(start, stop, status, word) -> None:
    run = start("grpo.max_num_steps=100000")
    run.wait_for_step(2)
    if stop == signal.SIGINT:
        os.killpg(run.process.pid, stop)  # as a terminal does, to the whole foreground group
    else:
        run.process.send_signal(stop)
    code, _, errors = run.end(within_s=15)
    assert code == status
    assert errors == f"{word}; the finished steps are in {run.log_dir}\n"
    assert run.watch.all_gone(within_s=10)
    assert len(run.steps()) >= 2
    assert (run.log_dir / "curves.png").exists()


@pytest.mark.exhaustive
def test_numbers_that_explode_are_skipped_then_end_the_run_with_step_and_samples(start) -> None:
    run = start(
        *("policy.megatron_cfg.optimizer.lr=1e30", "policy.max_grad_norm=0", "max_consecutive_skips=3"),
        "grpo.max_num_steps=50",
    )
    code, _, errors = run.end(within_s=180)
    assert code == 1
    steps = run.steps()
    last = steps[-1]["step"]
    assert last < 50
    assert f"the run stopped: step {last}: the optimizer step was skipped 3 times in a row" in errors
    assert "max_consecutive_skips: 3" in errors
    assert "prompt" in errors
    assert [step["train/update_successful"] for step in steps[-3:]] == [0, 0, 0]
    assert steps[-1]["train/skipped_steps"] == 3
    assert steps[0]["train/update_successful"] == 1
    assert run.watch.all_gone(within_s=10)
