"""A run with all loggers, killed and resumed: each has one run, with every step and its answers."""

import os
import signal
import time

import psutil
import pytest
from grpo_run import Run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_file import config_of, exit_code_of, rows_of, run_of

from nemo_rl_mcore.driver.observability.loggers import MLFLOW_ID_FILE

pytestmark = [pytest.mark.nightly, pytest.mark.needs("wandb", "mlflow")]
STEPS = 4


def test_every_logger_has_one_whole_run_after_a_kill_and_a_resume(tmp_path, monkeypatch) -> None:
    import mlflow

    folder = tmp_path / "run"
    overrides = (
        *(f"grpo.max_num_steps={STEPS}", "grpo.val_period=1", "grpo.max_val_samples=16"),
        *("cluster.cpu_workers_per_node=1", "policy.train_micro_batch_size=32"),
        *("logger.wandb_enabled=true", "logger.mlflow_enabled=true"),
        *("checkpointing.enabled=true", f"checkpointing.checkpoint_dir={folder / 'checkpoints'}"),
        "checkpointing.save_period=1",
    )
    monkeypatch.setenv("WANDB_MODE", "offline")
    killed = Run(folder, *overrides)
    killed.wait_for_step(2, within_s=240)
    services = [
        child for child in psutil.Process(killed.process.pid).children() if child.name() == "wandb-core"
    ]
    os.kill(killed.process.pid, signal.SIGSTOP)
    time.sleep(2)  # wandb writes what it has once a second
    os.kill(killed.process.pid, signal.SIGKILL)
    assert len(services) == 1
    until = time.monotonic() + 20
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in services):
        assert time.monotonic() < until, "the process of wandb outlives its run"
        time.sleep(0.1)
    killed.close()
    resumed = Run(folder, *overrides)
    status, output, errors = resumed.end(within_s=300)
    resumed.close()
    assert status == 0, errors
    assert " fails: " not in output
    first, second = sorted(folder.glob("wandb/offline-run-*"), key=lambda one: one.stat().st_mtime_ns)
    assert run_of(first).run_id == run_of(second).run_id
    assert config_of(second)["grpo"]["max_num_steps"] == STEPS
    rows = {row["step"]: row for row in [*rows_of(first), *rows_of(second)]}
    assert sorted(step for step in rows if step > 0) == [1, 2, 3, 4]
    assert exit_code_of(second) == 0

    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    run = client.get_run((folder / MLFLOW_ID_FILE).read_text())
    assert run.info.status == "FINISHED"
    logged = {
        metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "train/reward")
    }
    assert run.data.params["grpo.max_num_steps"] == str(STEPS)
    names = {one.path for one in client.list_artifacts(run.info.run_id, "validation/samples")}
    assert f"validation/samples/step_{STEPS}.json" in names

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("train/reward")}
    kept = {int(row["step"]): row["train/reward"] for row in resumed.steps() if row["step"] > 0}
    assert logged == kept == {step: rows[step]["train/reward"] for step in kept}
    assert shown == pytest.approx(kept)
    assert {event.step for event in events.Tensors("validation/samples")} >= {1, 2, 3, 4}
