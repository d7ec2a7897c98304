"""A run's loggers, which send metrics to services and can neither end nor block the run."""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import re
import secrets
import socket
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import batched
from pathlib import Path
from typing import Any

import psutil
import yaml

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability.sinks import Sample
from nemo_rl_mcore.driver.run_folder import leaves
from nemo_rl_mcore.driver.signals import EXIT_STATUS_OF_A_SIGNAL, exit_status_of

SAMPLE_COLUMNS = (
    *("step", "prompt_index", "source", "prompt", "answer", "response", "reward", "advantage"),
    *("response_tokens", "truncated"),
)
CALL_S = 60.0
"""Seconds allowed for a call to a service; after a timeout the run continues without that service."""
_TABLE_ROWS = 16
"""Number of answers in a step's or a validation's table, one per prompt."""
TABLE_PERIOD = 10
"""Number of steps between tables of training answers; every validation has a table."""
WANDB_ID_FILE, MLFLOW_ID_FILE = ".wandb_run_id", ".mlflow_run_id"
_RUN_ID = re.compile(r"\w+")
_PROCESS = "wandb-core"
_REAPED_WITHIN_S = 5.0
_FLUSHED_EVERY_S = 1.0
"""Seconds of data that an offline run loses at most to `kill -9`; wandb's default is 15 s."""
_OWN_SHARE = 0.8
"""Share of the time limit given to wandb's own waits, so that they fail first, with wandb's own explanation."""
_STORE, _ARTIFACTS = "mlflow.db", "mlflow_artifacts"
_ADDRESS = "MLFLOW_TRACKING_URI"
_METRICS_A_CALL, _PARAMS_A_CALL = 1000, 100
_NAME_LENGTH, _VALUE_LENGTH = 250, 6000


@dataclass(frozen=True)
class RunFacts:
    """The run's facts that a logger needs to open.

    recipe: the resolved recipe as JSON. resumed_step: the last step of the resumed earlier run, or None.
    """

    algorithm: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    resumed_step: int | None = None


type Tables = Mapping[str, Sequence[Sequence[Any]]]
"""Rows of answers with columns `SAMPLE_COLUMNS`, by table name."""


def kept_run_id(file: Path, resumed_step: int | None) -> str | None:
    """Return a resumed run's id in a service; None for a new run, or if no valid id was kept."""
    if resumed_step is None or not file.is_file():
        return None
    kept = file.read_text(encoding="utf-8", errors="replace").strip()
    return kept if _RUN_ID.fullmatch(kept) else None


@dataclass(eq=False)
class _Service:
    """A service that displays runs. where: the address or command for viewing the run, set by `open`."""

    config: LoggerConfig
    facts: RunFacts
    where: str = field(default="", init=False)

    def abandon(self) -> None:
        """Release a failed service; do nothing by default, since pending requests have their own time limit."""


class TensorBoardLogger(_Service):
    """Writes `log_dir/tensorboard`: a scalar per metric, and the recipe and answers as text, all flushed at once."""

    def open(self) -> None:
        folder = Path(self.config.log_dir) / "tensorboard"
        self.where = str(folder)
        # TensorBoard's own event writer is unsuitable: it writes in a thread, so its errors come later.
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("torch.utils.tensorboard.summary")
        records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        folder.mkdir(parents=True, exist_ok=True)
        # The viewer reads files in name order.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._records = records.RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        resumed_step, recipe = self.facts.resumed_step, self.facts.recipe
        if resumed_step is not None:
            # The viewer then drops events of later steps, which the resumed run repeats.
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(step=resumed_step + 1, session_log=start)
        text = self._text("recipe", dict(recipe))
        self._add(step=resumed_step or 0, summary=self._summaries.Summary(value=[text]))
        self._file.flush()

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables) -> None:
        value = self._summaries.Summary.Value
        scalars = [value(tag=name, simple_value=number) for name, number in metrics.items()]
        texts = [
            self._text(name, [dict(zip(SAMPLE_COLUMNS, row, strict=True)) for row in rows])
            for name, rows in tables.items()
        ]
        self._add(step=step, summary=self._summaries.Summary(value=[*scalars, *texts]))
        self._file.flush()

    def finish(self, exit_status: int) -> None:
        self._file.close()  # not in `abandon`: closing writes, and may hang like the failed call

    def _add(self, **fields: Any) -> None:
        self._records.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())

    def _text(self, tag: str, content: object) -> Any:
        """Return a value for the text plugin, which renders Markdown; indentation keeps lines verbatim."""
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        [value] = self._summaries.text(tag, textwrap.indent(text, "    ", lambda _line: True)).value
        value.tag = tag  # without the suffix that torch appends
        return value


class WandbLogger(_Service):
    """A Weights & Biases run, whose files go to `log_dir/wandb`.

    A resumed run continues its wandb run, by the id in `log_dir/.wandb_run_id`. The metric `step` is the axis, because
    wandb's own step numbers would make it drop the steps that a resumed run repeats.
    """

    _wandb: Any = None
    _run: Any = None

    def open(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        self._wandb = importlib.import_module("wandb")
        file = Path(self.config.log_dir) / WANDB_ID_FILE
        kept = kept_run_id(file, self.facts.resumed_step)
        limit = CALL_S * _OWN_SHARE
        self._run = self._wandb.init(
            **self.config.wandb.model_dump(exclude_none=True),
            id=kept or secrets.token_hex(8),
            resume="allow" if kept else None,
            job_type=self.facts.algorithm or None,
            config=dict(self.facts.recipe),
            dir=self.config.log_dir,
            settings=self._wandb.Settings(
                console="off",  # otherwise wandb would redirect the run's output
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

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables) -> None:
        shown = {
            name: self._wandb.Table(columns=list(SAMPLE_COLUMNS), data=list(rows))
            for name, rows in tables.items()
        }
        self._run.log({"step": step, **metrics, **shown})

    def finish(self, exit_status: int) -> None:
        self._run.finish(exit_code=exit_status)
        self._wandb.teardown()

    def abandon(self) -> None:
        """Kill wandb's process, so that pending calls fail and nothing waits for it at exit."""
        if self._wandb is None:
            return
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if child.name() == _PROCESS:
                    child.kill()
                    child.wait(_REAPED_WITHIN_S)
        with suppress(Exception):  # teardown fails without the process, and Python would report that at exit
            self._wandb.teardown()


class MLflowLogger(_Service):
    """An MLflow run, with the whole recipe as its parameters and as the artifact `recipe.json`.

    A resumed run continues its MLflow run, by the id in `log_dir/.mlflow_run_id`. Parameters keep their values from the
    first start, since MLflow allows no changes; `recipe.json` is the latest recipe.
    """

    _mlflow: Any = None
    _client: Any = None
    _id = ""

    def open(self) -> None:
        # By default, make two attempts per request within the time limit; MLflow's own limits are hours.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(max(1, int(CALL_S / 3))))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        self._mlflow = importlib.import_module("mlflow")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        given = os.environ.get(_ADDRESS)
        folder = Path(self.config.log_dir).absolute()
        address = given or f"sqlite:///{folder / _STORE}"
        self._client = self._mlflow.MlflowClient(tracking_uri=address)
        kept = kept_run_id(folder / MLFLOW_ID_FILE, self.facts.resumed_step)
        if kept:
            try:
                self._client.update_run(kept, status="RUNNING")
            except self._mlflow.exceptions.MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                kept = None  # the id is from another store
        self._id = kept or ""
        if not kept:
            section, client = self.config.mlflow, self._client
            found = client.get_experiment_by_name(section.experiment_name)
            if found is not None:
                experiment = found.experiment_id
            else:
                artifacts = None if given else (folder / _ARTIFACTS).as_uri()
                experiment = client.create_experiment(section.experiment_name, artifacts)
            tags = {"algorithm": self.facts.algorithm}
            self._id = client.create_run(experiment, run_name=section.run_name, tags=tags).info.run_id
            params = [
                self._mlflow.entities.Param(
                    _name(path), (value if isinstance(value, str) else json.dumps(value))[:_VALUE_LENGTH]
                )
                for path, value in leaves(dict(self.facts.recipe))
            ]
            for some in batched(params, _PARAMS_A_CALL):
                client.log_batch(self._id, params=some)
        (folder / MLFLOW_ID_FILE).write_text(self._id, encoding="utf-8")
        self._client.log_dict(self._id, dict(self.facts.recipe), "recipe.json")
        self.where = f"run {self._id} in {re.sub('//[^/@]*@', '//', address)}"

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables) -> None:
        """Send a step; each table is a file `<name>/step_N.json`, as `mlflow.load_table` and pandas read it."""
        now = int(time.time() * 1000)
        entries = [
            self._mlflow.entities.Metric(_name(name), value, now, step) for name, value in metrics.items()
        ]
        for some in batched(entries, _METRICS_A_CALL):
            self._client.log_batch(self._id, metrics=some)
        for name, rows in tables.items():
            content = {"columns": list(SAMPLE_COLUMNS), "data": [list(row) for row in rows]}
            self._client.log_dict(self._id, content, f"{name}/step_{step}.json")

    def finish(self, exit_status: int) -> None:
        failed = "KILLED" if exit_status > EXIT_STATUS_OF_A_SIGNAL else "FAILED"
        self._client.set_terminated(self._id, failed if exit_status else "FINISHED")


def _name(name: str) -> str:
    """Replace the characters that MLflow refuses in a name."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:_NAME_LENGTH]


type Logger = TensorBoardLogger | WandbLogger | MLflowLogger
"""Any call may fail or hang; `Loggers` then continues without that logger."""


class Loggers:
    """The configured loggers, each with its own thread and a time limit of a minute per call.

    A logger that fails or is too slow is reported once, by name; `metrics.jsonl` and `rollouts/` have the same data.
    """

    def __init__(self, config: LoggerConfig, run: RunFacts, say: Callable[[str], None]) -> None:
        self.startup_s: dict[str, float] = {}
        self._guarded = [_Guarded(name, logger, CALL_S, say) for name, logger in _asked_for(config, run)]

    def open(self) -> None:
        began = time.perf_counter()
        for guarded in self._guarded:
            guarded.open()
        if self._guarded:
            self.startup_s["loggers"] = time.perf_counter() - began

    def finish(self, error: BaseException | None) -> None:
        """Send each logger the run's exit status for this error, and print where it can be viewed."""
        status = exit_status_of(error)
        for guarded in self._guarded:
            guarded.call(partial(guarded.logger.finish, status))
            guarded.calls.put(None)
        for guarded in self._guarded:
            if not guarded.failed:
                guarded.say(guarded.logger.where)

    def log(self, step: int, metrics: Mapping[str, float], answers: Iterable[Sample]) -> None:
        tables = tables_of(answers, _TABLE_ROWS, of_training=step % TABLE_PERIOD == 0)
        for guarded in self._guarded:
            guarded.call(partial(guarded.logger.log, step, metrics, tables))


@dataclass(eq=False)
class _Guarded:
    """A logger with its own thread, which makes calls in order and stops after a failed one."""

    name: str
    logger: Logger
    timeout_s: float
    say: Callable[[str], None]
    failed: bool = False
    calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = field(
        default_factory=queue.SimpleQueue[Any], init=False
    )

    def open(self) -> None:
        def serve() -> None:
            while (asked := self.calls.get()) is not None:
                call, done = asked
                try:
                    call()
                except BaseException as error:  # noqa: BLE001  # re-raised for the caller that awaits the result
                    done.set_exception(error)
                else:
                    done.set_result(None)

        threading.Thread(target=serve, name=self.name, daemon=True).start()
        self.call(self.logger.open)
        if not self.failed:
            self.say(f"{self.name}: {self.logger.where}")

    def call(self, call: Callable[[], None]) -> None:
        if self.failed:
            return
        done = Future[None]()
        self.calls.put((call, done))
        try:
            done.result(self.timeout_s)
        except Exception as error:  # noqa: BLE001  # services and their clients may raise any error
            why = f"no answer within {self.timeout_s:g} s"
            if done.done():  # with passwords in addresses removed
                told = next(iter(str(error).strip().splitlines()), type(error).__name__)
                why = re.sub(r"//[^/\s@]+@", "//***@", told)
            self.failed = True
            self.calls.put(None)
            self.say(
                f"{self.name} fails: {why}; the run goes on without it, and metrics.jsonl has every step"
            )
            self.logger.abandon()


def _asked_for(config: LoggerConfig, run: RunFacts) -> Iterator[tuple[str, Logger]]:
    if config.tensorboard_enabled:
        yield "TensorBoard", TensorBoardLogger(config, run)
    if config.wandb_enabled:
        yield "Weights & Biases", WandbLogger(config, run)
    if config.mlflow_enabled:
        yield "MLflow", MLflowLogger(config, run)


def tables_of(samples: Iterable[Sample], rows: int, *, of_training: bool) -> dict[str, list[list[Any]]]:
    """Return a step's training and validation tables, with each prompt's first answer, up to a number of rows."""
    first = [sample for sample in samples if sample.sample_index == 0]
    tables: dict[str, list[list[Any]]] = {}
    for name, of_validation in (("train/samples", False), ("validation/samples", True)):
        shown = [sample for sample in first if sample.of_validation is of_validation][:rows]
        if not shown or not (of_validation or of_training):
            continue
        tables[name] = [[getattr(sample, column) for column in SAMPLE_COLUMNS] for sample in shown]
        for row in tables[name]:
            for column, value in enumerate(row):
                if isinstance(value, str):
                    # A lone surrogate, which cannot be encoded, becomes its JSON escape.
                    row[column] = value.encode(errors="backslashreplace").decode()
    return tables
