"""TensorBoard: scalars, the recipe and answers as text, in files of its own format."""

from __future__ import annotations

import importlib
import os
import socket
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability.loggers.logger import RunFacts, SampleTable

_PROTO = "tensorboard.compat.proto"


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
        self._add_values(resumed_step or 0, [self._text("recipe", dict(recipe))])
        self._file.flush()

    def log(self, step: int, metrics: Mapping[str, float], tables: Sequence[SampleTable]) -> None:
        """Add the scalars of a step, and its answers as text; raises OSError."""
        value = self._summaries.Summary.Value
        scalars = [value(tag=name, simple_value=number) for name, number in metrics.items()]
        texts = [
            self._text(table.name, [dict(zip(table.columns, row, strict=True)) for row in table.rows])
            for table in tables
        ]
        self._add_values(step, [*scalars, *texts])
        self._file.flush()

    def finish(self, exit_status: int) -> None:
        """Close the file."""
        self._file.close()

    def abandon(self) -> None:
        """Leave the file as it is: to close it would write, and may hang as what failed."""

    def _add_values(self, step: int, values: Sequence[Any]) -> None:
        self._add(step=step, summary=self._summaries.Summary(value=values))

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
