"""Configuration of a run's records: files in its log folder, and external loggers."""

from nemo_rl_mcore.config.base import FolderName, NonNegativeInt, StrictModel


class WandbConfig(StrictModel):
    """The run's project and name in Weights & Biases; the API key is never in a recipe."""

    project: str = "nemo-rl-mcore"
    """Project in Weights & Biases."""
    name: str | None = None
    """Name of the run; null lets the service choose a name."""


class MLflowConfig(StrictModel):
    """The run's experiment and name in MLflow; MLFLOW_TRACKING_URI sets the store, by default log_dir/mlflow.db."""

    experiment_name: str = "nemo-rl-mcore"
    """Experiment in MLflow, which is created if it does not exist."""
    run_name: str | None = None
    """Name of the run; null lets the service choose a name."""


class LoggerConfig(StrictModel):
    """A run's records: their folder and external loggers."""

    log_dir: FolderName = "logs"
    """Folder for the run's recipe, metrics.jsonl, rollouts, TensorBoard events and report."""
    answers_with_tokens: NonNegativeInt | None = 8
    """Number of answers in each step and validation, from the first, that are written token by token; all others are
    written as text. Null writes no answers (ours)."""
    tensorboard_enabled: bool = False
    """Write TensorBoard events into log_dir/tensorboard."""
    wandb_enabled: bool = False
    """Log the run to Weights & Biases; requires the extra `wandb`."""
    wandb: WandbConfig = WandbConfig()
    """The run's project and name in Weights & Biases."""
    mlflow_enabled: bool = False
    """Log the run to MLflow; requires the extra `mlflow`."""
    mlflow: MLflowConfig = MLflowConfig()
    """The run's experiment and name in MLflow."""
    num_val_samples_to_print: NonNegativeInt = 0
    """Number of validation samples shown in the terminal."""
