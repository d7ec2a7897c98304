"""What a run shows and leaves behind: metric sinks, loggers, progress, timing, report."""

from nemo_rl_mcore.driver.observability.loggers import RunFacts
from nemo_rl_mcore.driver.observability.progress import STARTUP_PREFIX
from nemo_rl_mcore.driver.observability.recorder import RunRecorder, finish_report
from nemo_rl_mcore.driver.observability.sinks import RolloutSink, Sample, read_history, read_rollouts

__all__ = [
    "STARTUP_PREFIX",
    "RolloutSink",
    "RunFacts",
    "RunRecorder",
    "Sample",
    "finish_report",
    "read_history",
    "read_rollouts",
]
