"""Configurations of where a run happens, and of its checkpoints."""

import re
from typing import Annotated

from pydantic import BeforeValidator

from nemo_rl_mcore.config.base import (
    FolderName,
    NonNegativeInt,
    PositiveInt,
    Rule,
    Seconds,
    StrictModel,
    SwitchedConfig,
)


def _seconds(duration: str) -> float:
    days, hours, minutes, seconds = map(int, duration.split(":"))
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _checked(duration: object) -> object:
    # YAML reads 1:00:00:00 as a number to the base of 60.
    if (
        not isinstance(duration, str)
        or not re.fullmatch(r"\d+:\d+:\d+:\d+", duration)
        or not _seconds(duration)
    ):
        raise ValueError(
            f"{duration!r} is no time: days, hours, minutes and seconds, together more than none; write it as "
            '"00:03:45:00", in quotes'
        )
    return duration


Duration = Annotated[str, BeforeValidator(_checked)]
"""Days, hours, minutes and seconds: "DD:HH:MM:SS"."""


class ClusterConfig(StrictModel):
    """The machines, and the ranks on each of them."""

    num_nodes: PositiveInt = 1
    """Machines."""
    gpus_per_node: NonNegativeInt = 0
    """Ranks per machine, one on each GPU; 0 runs on CPU with gloo."""
    cpu_workers_per_node: PositiveInt = 1
    """Ranks per machine when gpus_per_node is 0; not read otherwise."""
    max_trainer_restarts: NonNegativeInt = 0
    """Times in a run that ranks which died or hang are restarted, and do again what no checkpoint holds (ours)."""
    node_wait_s: Seconds = 300.0
    """Time in which a machine that is gone may come back, or another one in its place (ours)."""

    @property
    def on_cpu(self) -> bool:
        """Return whether the ranks run on CPU with gloo."""
        return self.gpus_per_node == 0

    @property
    def workers_per_node(self) -> int:
        """Return the number of ranks on each machine."""
        return self.gpus_per_node or self.cpu_workers_per_node

    @property
    def world_size(self) -> int:
        """Return all ranks."""
        return self.num_nodes * self.workers_per_node


_METRIC_SOURCES = {"val": "validation", "train": "train"}


class CheckpointingConfig(SwitchedConfig):
    """When checkpoints are written and runs resumed, and which are kept."""

    resume: str = "auto"
    """Where a run begins: `auto` after the latest checkpoint, or at the start without one; `must` after the latest one;
    `never` after any; or a folder step_N (ours)."""
    checkpoint_dir: FolderName = "results/checkpoints"
    """Folder of the checkpoints, of one run; every machine must see it."""
    metric_name: str | None = None
    """Metric that ranks them: `val:` or `train:` and the name of a metric; null ranks them by their step."""
    higher_is_better: bool = True
    """Whether a higher metric is better."""
    keep_top_k: PositiveInt | None = None
    """Checkpoints kept, the best ones and always the newest; null keeps all."""
    save_period: PositiveInt = 10
    """Steps between checkpoints; the last step is saved too."""
    checkpoint_must_save_by: Duration | None = None
    """Time since the start, "DD:HH:MM:SS", by which the run has ended with its last step saved; null: no limit."""

    @property
    def logged_metric(self) -> str | None:
        """Return the ranking metric as the run logs it."""
        if self.metric_name is None:
            return None
        source, _, name = self.metric_name.partition(":")
        return f"{_METRIC_SOURCES.get(source, source)}/{name}"

    @property
    def must_save_by_s(self) -> float | None:
        """Return the seconds of checkpoint_must_save_by."""
        return None if self.checkpoint_must_save_by is None else _seconds(self.checkpoint_must_save_by)

    rules = (
        Rule(
            "not-allowed",
            "metric_name",
            lambda own: (
                own.metric_name
                and not re.match(f"({'|'.join(_METRIC_SOURCES)}):.", own.metric_name, re.DOTALL)
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
