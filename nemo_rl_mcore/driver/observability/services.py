"""The services that get what a run logs: TensorBoard, Weights & Biases, MLflow; their libraries load when opened.

Of each logger `where` is what a person opens, or types, to see the run; it is known once the logger is open.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import secrets
import socket
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from typing import Any

import psutil
import yaml

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.run_folder import leaves

SAMPLE_COLUMNS = (
    *("step", "prompt_index", "source", "prompt", "answer", "response", "reward", "advantage"),
    *("response_tokens", "truncated"),
)
WANDB_ID_FILE, MLFLOW_ID_FILE = ".wandb_run_id", ".mlflow_run_id"
_RUN_ID = re.compile(r"\w+")
_PROTO = "tensorboard.compat.proto"
_PROCESS = "wandb-core"
_REAPED_WITHIN_S = 5.0
_FLUSHED_EVERY_S = 1.0
"""What offline runs lose to `kill -9` at most; wandb's own is 15 s."""
_OWN_SHARE = 0.8
"""Of the time limit, for the waits of wandb itself, which then end with what it knows of the cause."""
_STORE, _ARTIFACTS = "mlflow.db", "mlflow_artifacts"
_ADDRESS = "MLFLOW_TRACKING_URI"
_METRICS_A_CALL, _PARAMS_A_CALL = 1000, 100
_NAME_LENGTH, _VALUE_LENGTH = 250, 6000
_STOPPED_BY_SIGNAL = 128


@dataclass(frozen=True)
class RunFacts:
    """What a logger is told of the run when it opens.

    recipe: resolved, as JSON has it. resumed_step: the last step that is behind a run that goes on, else None.
    rewards_teach: whether the loss is of rewards, and not of given answers or a teacher alone.
    """

    algorithm: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    resumed_step: int | None = None
    rewards_teach: bool = True


@dataclass(frozen=True)
class SampleTable:
    """Answers of a step for people to read. name: `train/samples` or `validation/samples`."""

    name: str
    rows: Sequence[Sequence[Any]]
    columns: Sequence[str] = SAMPLE_COLUMNS


def kept_run_id(file: Path, resumed_step: int | None) -> str | None:
    """Return the id under which a service knows a continued run; None for a new run, or one that it never had."""
    if resumed_step is None or not file.is_file():
        return None
    kept = file.read_text(encoding="utf-8", errors="replace").strip()
    return kept if _RUN_ID.fullmatch(kept) else None


class TensorBoardLogger:
    """`log_dir/tensorboard`: one scalar per metric, the recipe and answers as text; on disk as soon as it is logged."""

    def __init__(self, config: LoggerConfig, run: RunFacts) -> None:
        self._folder, self._run = Path(config.log_dir) / config.tensorboard.log_dir, run
        self.where = str(self._folder)

    def open(self) -> None:
        """Begin a file of events."""
        # Not TensorBoard's own writer of event files: it writes in a thread, which fails by itself, and later.
        self._events: Any = importlib.import_module(f"{_PROTO}.event_pb2")
        self._summaries: Any = importlib.import_module(f"{_PROTO}.summary_pb2")
        self._tensors: Any = importlib.import_module(f"{_PROTO}.tensor_pb2")
        self._shapes: Any = importlib.import_module(f"{_PROTO}.tensor_shape_pb2")
        self._types: Any = importlib.import_module(f"{_PROTO}.types_pb2")
        records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._folder.mkdir(parents=True, exist_ok=True)
        # The viewer reads the files in the order of their names.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self._folder / name).open("wb")
        self._records = records.RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        resumed_step, recipe = self._run.resumed_step, self._run.recipe
        if resumed_step is not None:
            # The viewer then drops the events of later steps, which the resumed run writes again.
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(step=resumed_step + 1, session_log=start)
        text = self._text("recipe", dict(recipe))
        self._add(step=resumed_step or 0, summary=self._summaries.Summary(value=[text]))
        self._file.flush()

    def log(self, step: int, metrics: Mapping[str, float], tables: Sequence[SampleTable]) -> None:
        """Add the scalars of a step, and its answers as text; raises OSError."""
        value = self._summaries.Summary.Value
        scalars = [value(tag=name, simple_value=number) for name, number in metrics.items()]
        texts = [
            self._text(table.name, [dict(zip(table.columns, row, strict=True)) for row in table.rows])
            for table in tables
        ]
        self._add(step=step, summary=self._summaries.Summary(value=[*scalars, *texts]))
        self._file.flush()

    def finish(self, exit_status: int) -> None:
        """Close the file."""
        self._file.close()

    def abandon(self) -> None:
        """Leave the file as it is: to close it would write, and may hang as what failed."""

    def _add(self, **fields: Any) -> None:
        self._records.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())

    def _text(self, tag: str, content: object) -> Any:
        """Return a value of the text plugin, which shows Markdown: lines that are indented are shown as they are."""
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        size = self._shapes.TensorShapeProto.Dim(size=1)
        tensor = self._tensors.TensorProto(
            dtype=self._types.DT_STRING,
            tensor_shape=self._shapes.TensorShapeProto(dim=[size]),
            string_val=[textwrap.indent(text, "    ", lambda _line: True).encode()],
        )
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        return self._summaries.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


class WandbLogger:
    """A Weights & Biases run, whose files go to `log_dir/wandb`.

    A run that goes on after a step is the same one there, by the id in `log_dir/.wandb_run_id`. The axis is the metric
    `step`: the service drops rows whose own step number it has had, which are those that a resumed run trains again.
    """

    def __init__(self, config: LoggerConfig, run: RunFacts) -> None:
        self._config, self._facts = config, run
        self._wandb: Any = None
        self._run: Any = None
        self.where = ""

    def open(self) -> None:
        """Begin the run there, or go on with it."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to the makers of wandb
        os.environ.setdefault("WANDB_SILENT", "true")
        self._wandb = importlib.import_module("wandb")
        file = Path(self._config.log_dir) / WANDB_ID_FILE
        kept = kept_run_id(file, self._facts.resumed_step)
        limit = self._config.timeout_s * _OWN_SHARE
        self._run = self._wandb.init(
            **self._config.wandb.model_dump(exclude_none=True),
            id=kept or secrets.token_hex(8),
            resume="allow" if kept else None,
            job_type=self._facts.algorithm or None,
            config=dict(self._facts.recipe),
            dir=self._config.log_dir,
            settings=self._wandb.Settings(
                console="off",  # the terminal is the run's own: wandb would put itself between
                finish_timeout_raises=True,
                x_transaction_log_flush_interval=_FLUSHED_EVERY_S,
                login_timeout=limit,
                init_timeout=limit,
                finish_timeout=limit,
            ),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        file.write_text(self._run.id, encoding="utf-8")
        self.where = self._run.url if not self._run.offline else f"wandb sync {Path(self._run.dir).parent}"

    def log(self, step: int, metrics: Mapping[str, float], tables: Sequence[SampleTable]) -> None:
        """Send a step."""
        shown = {
            table.name: self._wandb.Table(columns=list(table.columns), data=list(table.rows))
            for table in tables
        }
        self._run.log({"step": step, **metrics, **shown})

    def finish(self, exit_status: int) -> None:
        """Send what is left, and end the process of wandb."""
        self._run.finish(exit_code=exit_status)
        self._wandb.teardown()

    def abandon(self) -> None:
        """Kill the process of wandb: a call that waits for it then fails, and so nothing waits for it at exit."""
        if self._wandb is None:
            return
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if child.name() == _PROCESS:
                    child.kill()
                    child.wait(_REAPED_WITHIN_S)
        with suppress(Exception):  # it finds its process gone; without this Python's exit would tell so
            self._wandb.teardown()


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
        # A request is tried twice within the time limit, unless the environment says otherwise; MLflow takes hours.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(max(1, int(self._config.timeout_s / 3))))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        self._mlflow = importlib.import_module("mlflow")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        given = self._config.mlflow.tracking_uri or os.environ.get(_ADDRESS)
        folder = Path(self._config.log_dir).absolute()
        address = given or f"sqlite:///{folder / _STORE}"
        self._client = self._mlflow.MlflowClient(tracking_uri=address)
        kept = kept_run_id(folder / MLFLOW_ID_FILE, self._run.resumed_step)
        if kept and self._goes_on(kept):
            self._id = kept
        else:
            self._id = self._new_run(None if given else (folder / _ARTIFACTS).as_uri())
        (folder / MLFLOW_ID_FILE).write_text(self._id, encoding="utf-8")
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
        texts = {
            path: value if isinstance(value, str) else json.dumps(value)
            for path, value in leaves(dict(self._run.recipe))
        }
        params = [
            self._mlflow.entities.Param(_name(path), text[:_VALUE_LENGTH]) for path, text in texts.items()
        ]
        for some in batched(params, _PARAMS_A_CALL):
            self._client.log_batch(made, params=some)
        return made


def _name(name: str) -> str:
    """As MLflow takes it: letters, digits, and few other characters."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:_NAME_LENGTH]
