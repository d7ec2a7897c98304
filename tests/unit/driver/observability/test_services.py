"""Weights & Biases, offline, and MLflow, in a file of the run: what is written is read back. No service was called."""

import gc
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from wandb_file import config_of, exit_code_of, records, rows_of, run_of
from written_samples import sample

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability import RunFacts, RunRecorder

pytestmark = [
    pytest.mark.exhaustive,
    # Of temporary folders that wandb leaves to the end of the process.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
RECIPE = {
    "grpo": {"max_num_steps": 3, "lr": 1e-6},
    "long": "x" * 7000,
    "many": {str(n): n for n in range(250)},
}


@pytest.fixture(autouse=True)
def _no_address(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    gc.collect()  # here, where what wandb leaves is no error


def recorder(service, log_dir, resumed_step=None):
    names = {"wandb": {"project": "p", "name": "n"}, "mlflow": {"experiment_name": "e", "run_name": "n"}}
    section = {f"{service}_enabled": True, service: names[service]}
    console = Console(file=io.StringIO(), width=300)
    run = RunFacts("grpo", RECIPE, resumed_step)
    return RunRecorder(LoggerConfig(log_dir=str(log_dir), **section), 10, console=console, run=run)


def told(run):
    return run._console.file.getvalue()


def shown(table):
    """The one row of a table."""
    [values] = table["data"]
    return dict(zip(table["columns"], values, strict=True))


def runs(log_dir):
    return sorted(log_dir.glob("wandb/offline-run-*"), key=lambda folder: folder.stat().st_mtime_ns)


def services():
    return [child for child in psutil.Process().children() if child.name() == "wandb-core"]


@pytest.mark.needs("wandb")
def test_wandb_has_recipe_metrics_answers_and_the_end(tmp_path, monkeypatch):
    for name, value in {"ENTITY": "e", "RUN_GROUP": "g", "TAGS": "a,b", "NOTES": "why"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    with recorder("wandb", tmp_path) as run:
        for step in (0, 1, 2):
            run.add_samples([sample(step, response="r\ud800", of_validation=True)])
            run.log(step, {"train/reward": step / 4, "odd": math.nan, "train/total_num_tokens": 8.0})
    (folder,) = runs(tmp_path)
    filed = run_of(folder)
    assert (filed.project, filed.display_name, filed.entity) == ("p", "n", "e")
    described = filed.run_group, list(filed.tags), filed.notes, filed.job_type
    assert described == ("g", ["a", "b"], "why", "grpo")
    assert config_of(folder) | RECIPE == config_of(folder)
    rows = rows_of(folder)
    assert [(row["step"], row["train/reward"]) for row in rows] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert rows[1]["odd"] == "NaN" or math.isnan(rows[1]["odd"])
    metrics = [record.metric for record in records(folder) if record.HasField("metric")]
    assert ("*", "step") in [(metric.glob_name, metric.step_metric) for metric in metrics]
    for step, row in enumerate(rows):
        table = json.loads((folder / "files" / row["validation/samples/path"]).read_text("utf-8"))
        row = shown(table)
        assert (row["step"], row["prompt"], row["response"]) == (step, "1>", "r\\ud800")
    assert exit_code_of(folder) == 0
    assert services() == []
    assert f"wandb sync {folder}\n" in told(run)


OUTLIVES_WANDB = """
import sys
import psutil
from rich.console import Console
from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability import RunRecorder, loggers

loggers.CALL_S = 10.0

def services():
    return [child for child in psutil.Process().children() if child.name() == "wandb-core"]

folder, number = sys.argv[1:]
config = LoggerConfig(log_dir=folder, wandb_enabled=True, wandb={"project": "p"})
wide = {f"train/{name}": 0.5 for name in range(300)}
with RunRecorder(config, 10, console=Console(width=300)) as run:
    run.log(1, wide)
    for service in services():
        service.send_signal(int(number))
    for step in range(2, 100):
        run.log(step, wide)
assert services() == []
"""


@pytest.mark.needs("wandb")
@pytest.mark.parametrize(("mode", "number"), [("offline", 9), ("offline", 19), ("online", 0)])
@pytest.mark.stage("processes")
def test_a_wandb_that_dies_or_hangs_or_is_not_there_is_told_and_left_behind(mode, number, tmp_path):
    """In a process of its own, whose end wandb would hold up. 9: killed; 19: stopped; online: nobody answers."""
    command = [sys.executable, "-c", OUTLIVES_WANDB, str(tmp_path), str(number)]
    nobody = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "k" * 40, "WANDB_MODE": mode}
    ended = subprocess.run(
        command, env=os.environ | nobody, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    (line,) = [line for line in ended.stdout.splitlines() if " fails: " in line]
    assert line.startswith("Weights & Biases fails: ")
    assert line.endswith("; the run goes on without it, and metrics.jsonl has every step")
    assert "k" * 40 not in ended.stdout
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 99
    assert "wandb sync" not in ended.stdout.splitlines()[-1]


def stored(log_dir):
    """The client of the run's own file, and its runs, the newest last."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{log_dir / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("e")
    return client, client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])


def artifact(client, run, path):
    return json.loads(Path(client.download_artifacts(run.info.run_id, path)).read_text("utf-8"))


@pytest.mark.needs("mlflow")
def test_mlflow_has_recipe_metrics_answers_and_the_end(tmp_path):
    with recorder("mlflow", tmp_path) as begun:
        for step in (0, 1, 2):
            begun.add_samples([sample(step, response="r\ud800", of_validation=True)])
            begun.log(step, {"train/reward": step / 4, "odd": math.nan, "validation/a?b/x": 1.0})
    client, (run,) = stored(tmp_path)
    assert (run.info.run_name, run.info.status) == ("n", "FINISHED")
    assert run.data.tags.items() >= {"algorithm": "grpo"}.items()
    assert run.data.params["grpo.lr"] == "1e-06"
    assert run.data.params["long"] == "x" * 6000
    assert [run.data.params[f"many.{n}"] for n in range(250)] == [str(n) for n in range(250)]
    assert artifact(client, run, "recipe.json") == RECIPE
    history = client.get_metric_history(run.info.run_id, "train/reward")
    assert [(metric.step, metric.value) for metric in history] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert math.isnan(run.data.metrics["odd"])
    assert run.data.metrics["validation/a_b/x"] == 1.0
    table = artifact(client, run, "validation/samples/step_2.json")
    row = shown(table)
    assert (row["step"], row["prompt"], row["response"]) == (2, "1>", "r\\ud800")
    assert f" {run.info.run_id} in sqlite:///{tmp_path}/mlflow.db\n" in told(begun)
    assert not (Path.cwd() / "mlruns").exists()


@pytest.mark.needs("mlflow")
def test_a_resumed_run_that_the_store_does_not_have_is_a_new_one_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MLflow puts the files of a store of one's own below the working folder
    for resumed_step, name in ((None, "one.db"), (1, "other.db")):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / name}")
        with recorder("mlflow", tmp_path, resumed_step) as begun:
            begun.log((resumed_step or 0) + 1, {"train/reward": 0.5})
        assert " fails: " not in told(begun)
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'other.db'}")
    run = client.get_run((tmp_path / ".mlflow_run_id").read_text())
    assert (run.data.metrics["train/reward"], run.data.params["grpo.lr"]) == (0.5, "1e-06")


@pytest.mark.needs("mlflow")
@pytest.mark.parametrize(("error", "status"), [(RuntimeError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_how_a_run_ends_is_told(error, status, tmp_path):
    def run():
        with recorder("mlflow", tmp_path) as begun:
            begun.log(1, {"train/reward": 0.5})
            raise error

    with pytest.raises(error):
        run()
    assert stored(tmp_path)[1][0].info.status == status
