"""`nemo-rl-mcore grpo` as a person runs it: a short run, and signals."""

import os
import signal

import pytest

from nemo_rl_mcore.driver.observability import read_rollouts

UNSAVED = ("checkpointing.enabled=true", "checkpointing.save_period=99999", "grpo.max_num_steps=100000")


def test_a_short_run_leaves_metrics_curves_and_samples(start):
    run = start(
        *("run", "logger.tensorboard_enabled=true"),
        *("grpo.max_num_steps=3", "loss_fn.reference_policy_kl_penalty=0.01"),
        *("policy.train_micro_batch_size=32", "policy.train_global_batch_size=128"),
    )
    output = run.finish(within_s=180)
    assert "step 3/3" in output
    assert "accuracy" in output
    steps = run.steps()
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        # Two optimizer steps a rollout: generation and training agree on the log-probabilities of both.
        assert step["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
        assert step["train/global_valid_seqs"] == 256
        assert step["train/skipped_steps"] == 0
        assert step["train/kl_penalty"] is not None
        timed = {f"timing/{what}" for what in ("generation", "logprobs", "train")}
        assert timed | {"performance/tokens_per_sec"} <= step.keys()
    assert (run.log_dir / "report.html").stat().st_size > 1 << 20
    assert (run.log_dir / "config.yaml").exists()
    assert list((run.log_dir / "tensorboard").glob("events*"))
    assert output.startswith("starting Ray ... ")
    assert "starting 2 ranks " in output
    assert len(list(read_rollouts(run.log_dir / "rollouts/step_3.jsonl.gz"))) == 256
    assert steps[0]["timing/total"] < steps[0]["timing/startup/policy"], (
        "none of the start is in the first step"
    )
    assert run.watch.all_gone(within_s=10)


@pytest.mark.usefixtures("heard_hangups")
@pytest.mark.exhaustive_cases("15-143-terminated")
@pytest.mark.parametrize(
    ("stop", "status", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, "hung up"),
    ],
)
def test_a_signal_stops_cleanly_and_the_same_command_goes_on(start, stop, status, word):
    run = start("run", *UNSAVED)
    run.wait_for_step(2)
    if stop == signal.SIGINT:
        os.killpg(run.process.pid, stop)  # as a terminal does, to the whole foreground group
    else:
        run.process.send_signal(stop)
    code, _, errors = run.end(within_s=15)
    last = len(run.steps())
    assert code == status
    saved = run.log_dir / "checkpoints" / f"step_{last}"
    told = f"step {last} is saved in {saved}, and the same command goes on from there"
    assert errors == f"{word}; {told}\n"
    assert run.watch.all_gone(within_s=10)
    assert last >= 2
    assert (run.log_dir / "report.html").exists()
