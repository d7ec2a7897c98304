"""Configurations of a run's machines and checkpoints."""

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator

from nemo_rl_mcore.config.base import (
    FolderName,
    NonNegativeInt,
    PositiveInt,
    Rule,
    StrictModel,
    Switched,
)


def seconds_of(duration: str | None) -> float | None:
    """Return a duration "DD:HH:MM:SS" in seconds."""
    if duration is None:
        return None
    days, hours, minutes, seconds = map(int, duration.split(":"))
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _checked(duration: object) -> object:
    # YAML reads 1:00:00:00 as a base-60 number.
    if (
        not isinstance(duration, str)
        or not re.fullmatch(r"\d+:\d+:\d+:\d+", duration)
        or not seconds_of(duration)
    ):
        raise ValueError(
            f"{duration!r} is not a duration above zero; write days, hours, minutes and seconds in quotes, as in "
            '"00:03:45:00"'
        )
    return duration


Duration = Annotated[str, BeforeValidator(_checked)]
"""A duration as "DD:HH:MM:SS": days, hours, minutes and seconds."""


class ClusterConfig(StrictModel):
    """The machines, and the ranks on each machine."""

    num_nodes: PositiveInt = 1
    """Number of machines."""
    gpus_per_node: NonNegativeInt = 0
    """Ranks per machine, one per GPU; 0 runs on CPUs with gloo."""
    cpu_workers_per_node: PositiveInt = 1
    """Ranks per machine if gpus_per_node is 0; ignored otherwise."""
    in_process: Literal["auto", "never"] = "auto"
    """Run a single rank in the driver's process, without Ray (ours): auto does so if no other process is needed, that
    is, with embedded generation, one model, no processes for the environment, no agents, and no restarts."""
    max_trainer_restarts: NonNegativeInt = 0
    """Maximum restarts of dead or hanging ranks; each repeats the steps since the last checkpoint (ours)."""

    @property
    def on_cpu(self) -> bool:
        """True if the ranks run on CPUs with gloo."""
        return self.gpus_per_node == 0

    @property
    def workers_per_node(self) -> int:
        """Return the number of ranks on each machine."""
        return self.gpus_per_node or self.cpu_workers_per_node

    @property
    def world_size(self) -> int:
        """Return the number of ranks on all machines."""
        return self.num_nodes * self.workers_per_node


METRIC_SOURCES = {"val": "validation", "train": "train"}
"""Prefixes of metrics in a recipe, with their prefixes in the log."""


class CheckpointingConfig(Switched):
    """Writing and keeping of checkpoints, and resuming from them."""

    resume: str = "auto"
    """Starting point of a run: `auto`, the latest checkpoint if there is one; `must`, the latest checkpoint, which must
    exist; `never`, step 0; or a checkpoint folder step_N (ours)."""
    checkpoint_dir: FolderName = "results/checkpoints"
    """Folder for the run's checkpoints, which all machines must share."""
    metric_name: str | None = None
    """Metric that ranks checkpoints, such as val:accuracy or train:reward; null ranks them by step."""
    higher_is_better: bool = True
    """Prefer higher values of the metric; false prefers lower ones."""
    keep_top_k: PositiveInt | None = None
    """Number of best checkpoints to keep, besides the newest; null keeps all."""
    save_period: PositiveInt = 10
    """Number of steps between checkpoints; the last step is always saved."""
    checkpoint_must_save_by: Duration | None = None
    """Time since the start, "DD:HH:MM:SS", after which the run saves its last step and ends; null means no limit."""

    rules = (
        Rule(
            "not-allowed",
            "metric_name",
            lambda own: (
                own.metric_name
                and not re.match(f"({'|'.join(METRIC_SOURCES)}):.", own.metric_name, re.DOTALL)
            ),
            fix="write val: or train: before its name, such as val:accuracy",
        ),
        Rule(
            "requires",
            "resume",
            lambda own: not own.enabled and own.resume not in ("auto", "never"),
            ("enabled",),
            "set enabled: true; or policy.init_checkpoint, to start from the weights alone",
        ),
        Rule(
            "requires",
            "checkpoint_must_save_by",
            lambda own: not own.enabled and own.checkpoint_must_save_by is not None,
            ("enabled",),
            {"enabled": True},
        ),
    )
