"""All loggers of a run, none of which can end or hold up the run: each is a service that gets what the run logs."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability.ending import exit_status_of
from nemo_rl_mcore.driver.observability.rollouts import Sample
from nemo_rl_mcore.driver.observability.services import (
    SAMPLE_COLUMNS,
    MLflowLogger,
    RunFacts,
    SampleTable,
    TensorBoardLogger,
    WandbLogger,
)

type Logger = TensorBoardLogger | WandbLogger | MLflowLogger
"""A place that is shown a run. Any call may fail or hang; `Loggers` then goes on without it."""


class Loggers:
    """A metric sink: the loggers that the config asks for, open inside its block.

    Each has a thread, and `logger.timeout_s` for each call. One that fails or takes longer is told of once, by name,
    and the run goes on without it; `metrics.jsonl` and `rollouts/` hold the same. Leaving the block tells each how the
    run has ended.
    """

    def __init__(self, config: LoggerConfig, run: RunFacts, say: Callable[[str], None]) -> None:
        self._config = config
        self.startup_s: dict[str, float] = {}
        asked_for = _asked_for(config, run)
        self._guarded = [_Guarded(name, logger, config.timeout_s, say) for name, logger in asked_for]
        self._added: list[Sample] = []

    def __enter__(self) -> Self:
        """Open them."""
        began = time.perf_counter()
        for guarded in self._guarded:
            guarded.open()
        if self._guarded:
            self.startup_s["loggers"] = time.perf_counter() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish them, by how the block has ended."""
        status = exit_status_of(error)
        for guarded in self._guarded:
            guarded.finish(status)

    def add(self, samples: Iterable[Sample]) -> None:
        """Keep answers until the step is logged."""
        if self._guarded:
            self._added += samples

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give them the metrics of a step and what is shown of its answers."""
        period = self._config.sample_table_period
        of_training = period > 0 and step % period == 0
        tables = list(tables_of(self._added, self._config.sample_table_rows, of_training=of_training))
        self._added = []
        for guarded in self._guarded:
            guarded.log(step, metrics, tables)

    def close(self) -> None:
        """Forget the answers of a step that was not finished."""
        self._added = []

    @property
    def places(self) -> list[str]:
        """Return where a person finds the run, of each that still takes it."""
        return [guarded.logger.where for guarded in self._guarded if not guarded.failed]


class _Guarded:
    """A logger in a thread of its own, which does one call after the other; after one that failed it does none."""

    def __init__(self, name: str, logger: Logger, timeout_s: float, say: Callable[[str], None]) -> None:
        self.logger, self.failed = logger, False
        self._name, self._timeout_s, self._say = name, timeout_s, say
        self._calls = queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None]()

    def open(self) -> None:
        threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        self._call(self.logger.open)
        if not self.failed:
            self._say(f"{self._name}: {self.logger.where}")

    def log(self, step: int, metrics: Mapping[str, float], tables: Sequence[SampleTable]) -> None:
        self._call(lambda: self.logger.log(step, metrics, tables))

    def finish(self, exit_status: int) -> None:
        self._call(lambda: self.logger.finish(exit_status))
        self._calls.put(None)

    def _call(self, call: Callable[[], None]) -> None:
        if self.failed:
            return
        done = Future[None]()
        self._calls.put((call, done))
        try:
            done.result(self._timeout_s)
        except Exception as error:  # noqa: BLE001  # whatever a service raises, or its client
            why = f"no answer within {self._timeout_s:g} s"
            if done.done():  # without a password that stood in an address
                told = next(iter(str(error).strip().splitlines()), type(error).__name__)
                why = re.sub(r"//[^/\s@]+@", "//***@", told)
            self.failed = True
            self._calls.put(None)
            self._say(
                f"{self._name} fails: {why}; the run goes on without it, and metrics.jsonl has every step"
            )
            self.logger.abandon()

    def _serve(self) -> None:
        while (asked := self._calls.get()) is not None:
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

    def cell(value: Any) -> Any:
        # A lone surrogate, which no encoding takes, becomes the escape that JSON has for it.
        return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value

    first = [sample for sample in samples if sample.sample_index == 0]
    for name, of_validation in (("train/samples", False), ("validation/samples", True)):
        shown = [sample for sample in first if sample.of_validation is of_validation][:rows]
        if shown and (of_validation or of_training):
            yield SampleTable(
                name, [[cell(getattr(sample, column)) for column in SAMPLE_COLUMNS] for sample in shown]
            )
