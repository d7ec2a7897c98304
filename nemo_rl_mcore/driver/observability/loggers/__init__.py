"""The services that get what a run logs: TensorBoard, Weights & Biases, MLflow."""

from nemo_rl_mcore.driver.observability.loggers.all_loggers import Loggers
from nemo_rl_mcore.driver.observability.loggers.logger import Logger, RunFacts, SampleTable

__all__ = ["Logger", "Loggers", "RunFacts", "SampleTable"]
