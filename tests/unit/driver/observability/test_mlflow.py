"""MLflow for real, in a file of the run: what is written is read back by its own client."""

import io
import json
import math
import os
from pathlib import Path

import pytest
from rich.console import Console
from written_samples import sample

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability import RunFacts, RunRecorder

pytestmark = [pytest.mark.needs("mlflow"), pytest.mark.exhaustive]
RECIPE = {
    "grpo": {"max_num_steps": 3, "lr": 1e-6},
    "long": "x" * 7000,
    "many": {str(n): n for n in range(250)},
}


@pytest.fixture(autouse=True)
def _no_address(monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)


def recorder(log_dir: Path, resumed_step: int | None = None, recipe=RECIPE, **section: object) -> RunRecorder:
    given = {"experiment_name": "e", "run_name": "n", **section}
    config = LoggerConfig(log_dir=str(log_dir), mlflow_enabled=True, mlflow=given)  # type: ignore[arg-type]
    console = Console(file=io.StringIO(), width=300)
    return RunRecorder(config, 10, console=console, run=RunFacts("grpo", recipe, resumed_step))


def told(run: RunRecorder) -> str:
    return run._console.file.getvalue()  # type: ignore[attr-defined]


def stored(log_dir: Path):
    """The client of the run's own file, and its runs, the newest last."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{log_dir / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("e")
    return client, client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])


def artifact(client, run, path: str):
    return json.loads(Path(client.download_artifacts(run.info.run_id, path)).read_text("utf-8"))


def test_recipe_metrics_answers_and_the_end_are_there(tmp_path) -> None:
    with recorder(tmp_path) as begun:
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
    (shown,) = [dict(zip(table["columns"], values, strict=True)) for values in table["data"]]
    assert (shown["step"], shown["prompt"], shown["response"]) == (2, "1>", "r\\ud800")
    assert f" {run.info.run_id} in sqlite:///{tmp_path}/mlflow.db\n" in told(begun)
    assert not (Path.cwd() / "mlruns").exists()


def test_a_resumed_run_that_the_store_does_not_have_is_a_new_one_there(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # MLflow puts the files of a store of one's own below the working folder
    for resumed_step, name in ((None, "one.db"), (1, "other.db")):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / name}")
        with recorder(tmp_path, resumed_step) as begun:
            begun.log((resumed_step or 0) + 1, {"train/reward": 0.5})
        assert " fails: " not in told(begun)
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'other.db'}")
    run = client.get_run((tmp_path / ".mlflow_run_id").read_text())
    assert (run.data.metrics["train/reward"], run.data.params["grpo.lr"]) == (0.5, "1e-06")


@pytest.mark.parametrize(("error", "status"), [(RuntimeError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_how_a_run_ends_is_told(error, status, tmp_path) -> None:
    def run() -> None:
        with recorder(tmp_path) as begun:
            begun.log(1, {"train/reward": 0.5})
            raise error

    with pytest.raises(error):
        run()
    assert stored(tmp_path)[1][0].info.status == status
