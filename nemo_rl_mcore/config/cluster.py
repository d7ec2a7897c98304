"""Configurations of where a run happens and what it leaves behind: machines, logger, checkpoints."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import NonNegativeInt, PositiveInt, Problem, StrictModel


class ClusterConfig(StrictModel):
    """The machines, and the ranks on each of them."""

    num_nodes: PositiveInt = 1
    """Machines."""
    gpus_per_node: NonNegativeInt = 0
    """Ranks per machine, one on each GPU; 0 runs on CPU with gloo."""
    cpu_workers_per_node: PositiveInt = 1
    """Ranks per machine when gpus_per_node is 0; not read otherwise."""

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks run on CPU with gloo."""
        return self.gpus_per_node == 0

    @property
    def workers_per_node(self) -> int:
        """Ranks on each machine."""
        return self.gpus_per_node or self.cpu_workers_per_node

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.num_nodes * self.workers_per_node


class WandbConfig(StrictModel):
    """Where Weights & Biases files the run."""

    project: str = "nemo-rl-mcore"
    """Project."""
    name: str | None = None
    """Name of the run; null lets the service choose one."""


class LoggerConfig(StrictModel):
    """What a run records, and where."""

    log_dir: str = "logs"
    """Folder of the run: metrics.jsonl, TensorBoard events, plots, samples."""
    tensorboard_enabled: bool = False
    """Write TensorBoard events."""
    wandb_enabled: bool = False
    """Send metrics to Weights & Biases; needs the extra `wandb`."""
    wandb: WandbConfig = WandbConfig()
    """Where Weights & Biases files the run."""
    num_val_samples_to_print: NonNegativeInt = 0
    """Validation samples shown in the terminal."""


class CheckpointingConfig(StrictModel):
    """When checkpoints are written, and which are kept."""

    enabled: bool = False
    """Whether checkpoints are written."""
    checkpoint_dir: str = "results/checkpoints"
    """Folder of the checkpoints."""
    metric_name: str | None = None
    """Metric that ranks them: `val:` or `train:` and the name of a metric."""
    higher_is_better: bool = True
    """Whether a higher metric is better."""
    keep_top_k: PositiveInt | None = None
    """Checkpoints kept; null keeps all."""
    save_period: PositiveInt = 10
    """Steps between checkpoints."""

    def problems(self) -> Iterator[Problem]:
        """Yield the refusal of writing."""
        if self.enabled:
            yield Problem("enabled", "checkpoints cannot be written yet", "set enabled: false")
