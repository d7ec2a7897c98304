"""Weights & Biases: metrics, the recipe and tables of answers, through its own process."""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability.loggers.logger import RunFacts, SampleTable, kept_run_id

RUN_ID_FILE = ".wandb_run_id"
_PROCESS = "wandb-core"
_REAPED_WITHIN_S = 5.0
_FLUSHED_EVERY_S = 1.0
"""What offline runs lose to `kill -9` at most; wandb's own is 15 s."""
_OWN_SHARE = 0.8
"""Of the time limit, for the waits of wandb itself, which then end with what it knows of the cause."""


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
        file = Path(self._config.log_dir) / RUN_ID_FILE
        kept = kept_run_id(file, self._facts.resumed_step)
        self._run = self._wandb.init(
            **self._config.wandb.model_dump(exclude_none=True),
            id=kept or secrets.token_hex(8),
            resume="allow" if kept else None,
            job_type=self._facts.algorithm or None,
            config=dict(self._facts.recipe),
            dir=self._config.log_dir,
            settings=self._settings(),
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

    def _settings(self) -> Any:
        limit = self._config.timeout_s * _OWN_SHARE
        limits = {"login_timeout": limit, "init_timeout": limit, "finish_timeout": limit}
        # The terminal is the run's own: wandb would put itself between.
        return self._wandb.Settings(
            console="off",
            finish_timeout_raises=True,
            x_transaction_log_flush_interval=_FLUSHED_EVERY_S,
            **limits,
        )

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
