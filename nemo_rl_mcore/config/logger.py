"""Configurations of what a run records: its own files, and the loggers that get the same."""

import re
from urllib.parse import urlsplit

from nemo_rl_mcore.config.base import (
    FolderName,
    NonNegativeInt,
    Rule,
    StrictModel,
)

_SQLITE = "sqlite:///"


class RolloutsConfig(StrictModel):
    """What is kept of the answers of each step and validation, in log_dir/rollouts (ours)."""

    answers_with_tokens: NonNegativeInt | None = 8
    """Answers of each step, and of each validation, of which every token is written: the first ones; 0: of none. Null
    writes no answer at all."""


class TensorBoardConfig(StrictModel):
    """Where TensorBoard's events go."""

    log_dir: FolderName = "tensorboard"
    """Folder of the events; a relative one lies in logger.log_dir."""


class WandbConfig(StrictModel):
    """How Weights & Biases files the run; its API key is never a key of a recipe."""

    project: str = "nemo-rl-mcore"
    """Project."""
    name: str | None = None
    """Name of the run; null lets the service choose one."""


class MLflowConfig(StrictModel):
    """How MLflow files the run."""

    experiment_name: str = "nemo-rl-mcore"
    """Experiment, made where it is missing."""
    run_name: str | None = None
    """Name of the run; null lets the service choose one."""
    tracking_uri: str | None = None
    """`http(s)://` of a server or `sqlite:///` of a file; null takes MLFLOW_TRACKING_URI, else log_dir/mlflow.db."""

    rules = (
        Rule(
            "not-allowed",
            "tracking_uri",
            lambda own: own.holds_a_user,
            fix="set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
            says="has a user or a password in it, which would be saved with the recipe",
        ),
        Rule(
            "not-allowed",
            "tracking_uri",
            lambda own: (
                own.tracking_uri is not None and not own.holds_a_user and not _is_store(own.tracking_uri)
            ),
            fix="write http://HOST:PORT, https://HOST or sqlite:///FILE, or null for log_dir/mlflow.db",
        ),
    )

    @property
    def holds_a_user(self) -> bool:
        """Return whether the address has a user or a password in it."""
        return re.search("//[^/]*@", self.tracking_uri or "") is not None


class LoggerConfig(StrictModel):
    """What a run records, and where."""

    log_dir: FolderName = "logs"
    """Folder of the run: recipe, metrics.jsonl, rollouts, TensorBoard events, report."""
    rollouts: RolloutsConfig = RolloutsConfig()
    """Every answer on disk (ours)."""
    tensorboard_enabled: bool = False
    """Write TensorBoard events."""
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    """Where TensorBoard's events go."""
    wandb_enabled: bool = False
    """Send the run to Weights & Biases; needs the extra `wandb`."""
    wandb: WandbConfig = WandbConfig()
    """How Weights & Biases files the run."""
    mlflow_enabled: bool = False
    """Send the run to MLflow; needs the extra `mlflow`."""
    mlflow: MLflowConfig = MLflowConfig()
    """How MLflow files the run."""
    num_val_samples_to_print: NonNegativeInt = 0
    """Validation samples shown in the terminal."""


def _is_store(uri: str) -> bool:
    if uri.startswith(_SQLITE):
        return len(uri) > len(_SQLITE)
    parts = urlsplit(uri)
    return parts.scheme in ("http", "https") and bool(parts.hostname)
