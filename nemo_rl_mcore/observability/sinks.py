"""Where metrics go: a JSON Lines file always, TensorBoard and Weights & Biases when the config asks."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from nemo_rl_mcore.config import LoggerConfig, WandbConfig

METRICS_FILE = "metrics.jsonl"


class MetricSink(Protocol):
    """A place that takes the metrics of one step at a time."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        ...

    def close(self) -> None:
        """Write what is left and release the place; idempotent."""
        ...


def open_sinks(config: LoggerConfig, resumed_step: int | None = None) -> list[MetricSink]:
    """Open every sink that the config asks for; when one cannot be opened, the others are closed again.

    resumed_step: the last step that is behind a run that goes on; files and events keep what came up to it.

    Raises:
        ValueError: `logger.wandb_enabled` without the package.

    """
    with ExitStack() as opened:
        sinks: list[MetricSink] = [JsonlSink(Path(config.log_dir), resumed_step)]
        opened.callback(sinks[0].close)
        if config.tensorboard_enabled:
            sinks.append(TensorBoardSink(Path(config.log_dir), resumed_step))
            opened.callback(sinks[-1].close)
        if config.wandb_enabled:
            sinks.append(WandbSink(Path(config.log_dir), config.wandb))
        opened.pop_all()
    return sinks


class JsonlSink:
    """`log_dir/metrics.jsonl`: one object a step, on disk as soon as it is logged.

    JSON knows no NaN and no infinity: a value that is not finite is written as null. A file that an earlier
    run left is renamed to `metrics.1.jsonl`, or the next free number: a file is one run, and nothing is lost.
    A resumed run goes on with the file, and it is the rows after `resumed_step` that are put aside so.
    """

    def __init__(self, log_dir: Path, resumed_step: int | None = None) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        path = log_dir / METRICS_FILE
        if path.exists() and path.stat().st_size:
            if resumed_step is None:
                path.rename(_next_free(path))
            else:
                _put_aside_after(resumed_step, path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line and flush it."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """`log_dir/tensorboard`: one scalar per metric."""

    def __init__(self, log_dir: Path, resumed_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # The viewer then drops the events of later steps, which the resumed run writes anew.
        purge_step = None if resumed_step is None else resumed_step + 1
        self._writer: Any = SummaryWriter(str(log_dir / "tensorboard"), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the scalars of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write the events that are still in memory."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run, whose files go to `log_dir`."""

    def __init__(self, log_dir: Path, config: WandbConfig) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise ValueError(
                "logger.wandb_enabled: the package wandb is not installed; install the extra with "
                "`uv sync --extra wandb`, or set logger.wandb_enabled to false"
            ) from error
        self._run: Any = wandb.init(project=config.project, name=config.name, dir=str(log_dir))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _put_aside_after(step: int, path: Path) -> None:
    """Keep the rows up to a step, and move the others, and a row that was cut off, into a file of their own.

    They are copied first, and the file is replaced at once: wherever the process dies, no row is lost.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    parts: dict[bool, list[str]] = {True: [], False: []}
    for line in lines:
        parts[_is_row_up_to(step, line)].append(line)
    if not parts[False]:
        return
    _next_free(path).write_text("".join(parts[False]), encoding="utf-8")
    shortened = path.with_suffix(".tmp")
    shortened.write_text("".join(parts[True]), encoding="utf-8")
    shortened.replace(path)


def _is_row_up_to(step: int, line: str) -> bool:
    try:
        row: Any = json.loads(line)
        return line.endswith("\n") and int(row["step"]) <= step
    except (ValueError, TypeError, KeyError):
        return False


def _next_free(path: Path) -> Path:
    number = 1
    while (renamed := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return renamed
