"""All loggers of a run, none of which can end or hold up the run: each is a service that gets what the run logs."""

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
from types import TracebackType
from typing import Any, Self

import psutil
import yaml

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability.sinks import Sample
from nemo_rl_mcore.driver.run_folder import leaves
from nemo_rl_mcore.driver.signals import exit_status_of

SAMPLE_COLUMNS = (
    *("step", "prompt_index", "source", "prompt", "answer", "response", "reward", "advantage"),
    *("response_tokens", "truncated"),
)
CALL_S = 60.0
"""In which a service has to take what it is given, or the run goes on without it."""
_TABLE_ROWS = 16
"""Answers that are shown of a step and of a validation, one a prompt."""
TABLE_PERIOD = 10
"""Steps between those that training answers are shown of; of validations every one is."""
WANDB_ID_FILE, MLFLOW_ID_FILE = ".wandb_run_id", ".mlflow_run_id"
_RUN_ID = re.compile(r"\w+")
_PROTO = "tensorboard.compat.proto"
_PROCESS = "wandb-core"
_REAPED_WITHIN_S = 5.0
_FLUSHED_EVERY_S = 1.0
"""Offline runs lose this much to `kill -9` at most; wandb's own is 15 s."""
_OWN_SHARE = 0.8
"""Of the time limit, for the waits of wandb itself, which then end with what it knows of the cause."""
_STORE, _ARTIFACTS = "mlflow.db", "mlflow_artifacts"
_ADDRESS = "MLFLOW_TRACKING_URI"
_METRICS_A_CALL, _PARAMS_A_CALL = 1000, 100
_NAME_LENGTH, _VALUE_LENGTH = 250, 6000
_STOPPED_BY_SIGNAL = 128


@dataclass(frozen=True)
class RunFacts:
    """Facts about the run for a logger that opens.

    recipe: resolved, as JSON has it. resumed_step: the last step that is behind a run that goes on, else None.
    rewards_teach: whether the loss is of rewards, and not of given answers or a teacher alone.
    """

    algorithm: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    resumed_step: int | None = None
    rewards_teach: bool = True


@dataclass(frozen=True)
class SampleTable:
    name: str
    rows: Sequence[Sequence[Any]]
    columns: Sequence[str] = SAMPLE_COLUMNS


def kept_run_id(file: Path, resumed_step: int | None) -> str | None:
    """Return the id under which a service knows a continued run; None for a new run, or one that it never had."""
    if resumed_step is None or not file.is_file():
        return None
    kept = file.read_text(encoding="utf-8", errors="replace").strip()
    return kept if _RUN_ID.fullmatch(kept) else None


@dataclass(eq=False)
class _Service:
    """A service that shows runs; `where` is the address or command for a person, known once it is open."""

    config: LoggerConfig
    facts: RunFacts
    where: str = field(default="", init=False)

    def abandon(self) -> None:
        """Let go of what failed: nothing is held by default, a request under way ends by its own limit."""


class TensorBoardLogger(_Service):
    """`log_dir/tensorboard`: one scalar per metric, the recipe and answers as text; on disk as soon as it is logged."""

    def open(self) -> None:
        folder = Path(self.config.log_dir) / self.config.tensorboard.log_dir
        self.where = str(folder)
        # Not TensorBoard's own writer of event files: it writes in a thread, which fails by itself, and later.
        self._events: Any = importlib.import_module(f"{_PROTO}.event_pb2")
        self._summaries: Any = importlib.import_module(f"{_PROTO}.summary_pb2")
        self._tensors: Any = importlib.import_module(f"{_PROTO}.tensor_pb2")
        self._shapes: Any = importlib.import_module(f"{_PROTO}.tensor_shape_pb2")
        self._types: Any = importlib.import_module(f"{_PROTO}.types_pb2")
        records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        folder.mkdir(parents=True, exist_ok=True)
        # The viewer reads the files in the order of their names.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._records = records.RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        resumed_step, recipe = self.facts.resumed_step, self.facts.recipe
        if resumed_step is not None:
            # The viewer then drops the events of later steps, which the resumed run writes again.
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(step=resumed_step + 1, session_log=start)
        text = self._text("recipe", dict(recipe))
        self._add(step=resumed_step or 0, summary=self._summaries.Summary(value=[text]))
        self._file.flush()

    def log(self, step: int, metrics: Mapping[str, float], tables: Sequence[SampleTable]) -> None:
        value = self._summaries.Summary.Value
        scalars = [value(tag=name, simple_value=number) for name, number in metrics.items()]
        texts = [
            self._text(table.name, [dict(zip(table.columns, row, strict=True)) for row in table.rows])
            for table in tables
        ]
        self._add(step=step, summary=self._summaries.Summary(value=[*scalars, *texts]))
        self._file.flush()

    def finish(self, exit_status: int) -> None:
        self._file.close()  # not where it is abandoned: that would write, and may hang as what failed

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


class WandbLogger(_Service):
    """A Weights & Biases run, whose files go to `log_dir/wandb`.

    A run that goes on after a step is the same one there, by the id in `log_dir/.wandb_run_id`. The axis is the metric
    `step`: the service drops rows whose own step number it has had, which are those that a resumed run trains again.
    """

    _wandb: Any = None
    _run: Any = None

    def open(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to the makers of wandb
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
        shown = {
            table.name: self._wandb.Table(columns=list(table.columns), data=list(table.rows))
            for table in tables
        }
        self._run.log({"step": step, **metrics, **shown})

    def finish(self, exit_status: int) -> None:
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


class MLflowLogger(_Service):
    """An MLflow run; the whole recipe is its parameters and its artifact `recipe.json`.

    A run that goes on after a step is the same one there, by the id in `log_dir/.mlflow_run_id`. Its parameters stay
    those of the first start, since MLflow allows no others; `recipe.json` is the newest.
    """

    _mlflow: Any = None
    _client: Any = None
    _id = ""

    def open(self) -> None:
        # A request is tried twice within the time limit, unless the environment says otherwise; MLflow takes hours.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(max(1, int(CALL_S / 3))))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        self._mlflow = importlib.import_module("mlflow")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        given = self.config.mlflow.tracking_uri or os.environ.get(_ADDRESS)
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
                kept = None  # of another store
        self._id = kept or ""
        if not kept:
            section, client = self.config.mlflow, self._client
            found = client.get_experiment_by_name(section.experiment_name)
            experiment = found.experiment_id if found is not None else None
            if experiment is None:
                artifacts = None if given else (folder / _ARTIFACTS).as_uri()
                experiment = client.create_experiment(section.experiment_name, artifacts)
            tags = {"algorithm": self.facts.algorithm}
            self._id = client.create_run(experiment, run_name=section.run_name, tags=tags).info.run_id
            params = list[Any]()
            for path, value in leaves(dict(self.facts.recipe)):
                text = value if isinstance(value, str) else json.dumps(value)
                params.append(self._mlflow.entities.Param(_name(path), text[:_VALUE_LENGTH]))
            for some in batched(params, _PARAMS_A_CALL):
                client.log_batch(self._id, params=some)
        (folder / MLFLOW_ID_FILE).write_text(self._id, encoding="utf-8")
        self._client.log_dict(self._id, dict(self.facts.recipe), "recipe.json")
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
        failed = "KILLED" if exit_status > _STOPPED_BY_SIGNAL else "FAILED"
        self._client.set_terminated(self._id, failed if exit_status else "FINISHED")


def _name(name: str) -> str:
    """As MLflow takes it: letters, digits, and few other characters."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:_NAME_LENGTH]


type Logger = TensorBoardLogger | WandbLogger | MLflowLogger
"""A place that is shown a run. Any call may fail or hang; `Loggers` then goes on without it."""


class Loggers:
    """A metric sink: the loggers that the config asks for, open inside its block.

    Each has a thread, and a minute for each call. One that fails or takes longer is told of once, by name,
    and the run goes on without it; `metrics.jsonl` and `rollouts/` hold the same. Leaving the block tells each how the
    run has ended.
    """

    def __init__(self, config: LoggerConfig, run: RunFacts, say: Callable[[str], None]) -> None:
        self._config = config
        self.startup_s: dict[str, float] = {}
        asked_for = _asked_for(config, run)
        self._guarded = [_Guarded(name, logger, CALL_S, say) for name, logger in asked_for]

    def __enter__(self) -> Self:
        began = time.perf_counter()
        for guarded in self._guarded:
            guarded.open()
        if self._guarded:
            self.startup_s["loggers"] = time.perf_counter() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = exit_status_of(error)
        for guarded in self._guarded:
            guarded.call(partial(guarded.logger.finish, status))
            guarded.calls.put(None)

    def log(self, step: int, metrics: Mapping[str, float], answers: Iterable[Sample]) -> None:
        tables = list(tables_of(answers, _TABLE_ROWS, of_training=step % TABLE_PERIOD == 0))
        for guarded in self._guarded:
            guarded.call(partial(guarded.logger.log, step, metrics, tables))

    @property
    def places(self) -> list[str]:
        return [guarded.logger.where for guarded in self._guarded if not guarded.failed]


type _Call = tuple[Callable[[], None], Future[None]]


@dataclass(eq=False)
class _Guarded:
    """A logger in a thread of its own, which does one call after the other; after one that failed it does none."""

    name: str
    logger: Logger
    timeout_s: float
    say: Callable[[str], None]
    failed: bool = False
    calls: queue.SimpleQueue[_Call | None] = field(
        default_factory=queue.SimpleQueue[_Call | None], init=False
    )

    def open(self) -> None:
        threading.Thread(target=self._serve, name=self.name, daemon=True).start()
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
        except Exception as error:  # noqa: BLE001  # whatever a service raises, or its client
            why = f"no answer within {self.timeout_s:g} s"
            if done.done():  # without a password that stood in an address
                told = next(iter(str(error).strip().splitlines()), type(error).__name__)
                why = re.sub(r"//[^/\s@]+@", "//***@", told)
            self.failed = True
            self.calls.put(None)
            self.say(
                f"{self.name} fails: {why}; the run goes on without it, and metrics.jsonl has every step"
            )
            self.logger.abandon()

    def _serve(self) -> None:
        while (asked := self.calls.get()) is not None:
            call, done = asked
            try:
                call()
            except BaseException as error:  # noqa: BLE001  # raised by whoever waits for it
                done.set_exception(error)
            else:
                done.set_result(None)


def _asked_for(config: LoggerConfig, run: RunFacts) -> Iterator[tuple[str, Logger]]:
    if config.tensorboard_enabled:
        yield "TensorBoard", TensorBoardLogger(config, run)
    if config.wandb_enabled:
        yield "Weights & Biases", WandbLogger(config, run)
    if config.mlflow_enabled:
        yield "MLflow", MLflowLogger(config, run)


def tables_of(samples: Iterable[Sample], rows: int, *, of_training: bool) -> Iterator[SampleTable]:
    """Yield what is shown of a step: of each prompt's first answer so many rows, those of a validation apart."""
    first = [sample for sample in samples if sample.sample_index == 0]
    for name, of_validation in (("train/samples", False), ("validation/samples", True)):
        shown = [sample for sample in first if sample.of_validation is of_validation][:rows]
        if not shown or not (of_validation or of_training):
            continue
        cells = [[getattr(sample, column) for column in SAMPLE_COLUMNS] for sample in shown]
        for row in cells:
            for column, value in enumerate(row):
                if isinstance(value, str):
                    # A lone surrogate, which no encoding takes, becomes the escape that JSON has for it.
                    row[column] = value.encode(errors="backslashreplace").decode()
        yield SampleTable(name, cells)
