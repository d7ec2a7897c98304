"""A run's output: metric sinks, loggers, progress, timing, report."""

from nemo_rl_mcore.driver.observability.loggers import RunFacts
from nemo_rl_mcore.driver.observability.recorder import STARTUP_PREFIX, RunRecorder
from nemo_rl_mcore.driver.observability.sinks import RolloutSink, Sample, read_history, read_rollouts

__all__ = [
    "STARTUP_PREFIX",
    "RolloutSink",
    "RunFacts",
    "RunRecorder",
    "Sample",
    "read_history",
    "read_rollouts",
]
