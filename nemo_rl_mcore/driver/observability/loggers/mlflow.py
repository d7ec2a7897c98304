"""MLflow: metrics, the recipe and tables of answers, in a file of the run or on a server."""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import batched
from pathlib import Path
from typing import Any

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability.loggers.logger import RunFacts, SampleTable, flattened, kept_run_id

RUN_ID_FILE = ".mlflow_run_id"
_STORE, _ARTIFACTS = "mlflow.db", "mlflow_artifacts"
_ADDRESS = "MLFLOW_TRACKING_URI"
_METRICS_A_CALL, _PARAMS_A_CALL = 1000, 100
_NAME_LENGTH, _VALUE_LENGTH = 250, 6000
_STOPPED_BY_SIGNAL = 128


class MLflowLogger:
    """An MLflow run; the whole recipe is its parameters and its artifact `recipe.json`.

    A run that goes on after a step is the same one there, by the id in `log_dir/.mlflow_run_id`. Its parameters stay
    those of the first start, since MLflow allows no others; `recipe.json` is the newest.
    """

    def __init__(self, config: LoggerConfig, run: RunFacts) -> None:
        self._config, self._run = config, run
        self._mlflow: Any = None
        self._client: Any = None
        self._id = self.where = ""

    def open(self) -> None:
        """Begin the run there, or go on with it."""
        _bound_requests(self._config.timeout_s)
        self._mlflow = importlib.import_module("mlflow")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        given = self._config.mlflow.tracking_uri or os.environ.get(_ADDRESS)
        folder = Path(self._config.log_dir).absolute()
        address = given or f"sqlite:///{folder / _STORE}"
        self._client = self._mlflow.MlflowClient(tracking_uri=address)
        kept = kept_run_id(folder / RUN_ID_FILE, self._run.resumed_step)
        if kept and self._goes_on(kept):
            self._id = kept
        else:
            self._id = self._new_run(None if given else (folder / _ARTIFACTS).as_uri())
        (folder / RUN_ID_FILE).write_text(self._id, encoding="utf-8")
        self._client.log_dict(self._id, dict(self._run.recipe), "recipe.json")
        self.where = f"run {self._id} in {re.sub('//[^/@]*@', '//', address)}"

    def log(self, step: int, metrics: Mapping[str, float], tables: Sequence[SampleTable]) -> None:
        """Send a step; each table is a file `<name>/step_N.json`, as `mlflow.load_table` and pandas read it."""
        now = int(time.time() * 1000)
        entries = [
            self._mlflow.entities.Metric(_name(name), value, now, step) for name, value in metrics.items()
        ]
        for some in batched(entries, _METRICS_A_CALL):
            self._client.log_batch(self._id, metrics=some)
        for table in tables:
            content = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
            self._client.log_dict(self._id, content, f"{table.name}/step_{step}.json")

    def finish(self, exit_status: int) -> None:
        """Say how the run has ended."""
        failed = "KILLED" if exit_status > _STOPPED_BY_SIGNAL else "FAILED"
        self._client.set_terminated(self._id, failed if exit_status else "FINISHED")

    def abandon(self) -> None:
        """Nothing is held: a request under way ends by its own limit."""

    def _goes_on(self, kept: str) -> bool:
        """Open a run again; False where the store, which may be another one by now, has none of the id."""
        try:
            self._client.update_run(kept, status="RUNNING")
        except self._mlflow.exceptions.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return True

    def _new_run(self, artifacts: str | None) -> str:
        section = self._config.mlflow
        found = self._client.get_experiment_by_name(section.experiment_name)
        experiment = found.experiment_id if found is not None else None
        if experiment is None:
            artifacts = section.artifact_location or artifacts
            experiment = self._client.create_experiment(section.experiment_name, artifacts)
        tags = {"algorithm": self._run.algorithm, **section.tags}
        made: str = self._client.create_run(experiment, run_name=section.run_name, tags=tags).info.run_id
        for some in batched(self._params(), _PARAMS_A_CALL):
            self._client.log_batch(made, params=some)
        return made

    def _params(self) -> Iterator[Any]:
        for path, value in flattened(self._run.recipe):
            yield self._mlflow.entities.Param(_name(path), value[:_VALUE_LENGTH])


def _bound_requests(timeout_s: float) -> None:
    """Have requests tried twice within the time limit, unless the environment says otherwise; MLflow takes hours."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(max(1, int(timeout_s / 3))))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")


def _name(name: str) -> str:
    """As MLflow takes it: letters, digits, and few other characters."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:_NAME_LENGTH]
