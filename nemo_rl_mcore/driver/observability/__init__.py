"""What a run shows and leaves behind: metric sinks, loggers, progress, timing, report."""

from nemo_rl_mcore.driver.observability.loggers import Loggers, RunFacts
from nemo_rl_mcore.driver.observability.progress import ProgressDisplay
from nemo_rl_mcore.driver.observability.recorder import RunRecorder, finish_report
from nemo_rl_mcore.driver.observability.report import HistorySink, print_report, read_history
from nemo_rl_mcore.driver.observability.rollouts import RolloutSink, Sample, read_rollouts
from nemo_rl_mcore.driver.observability.sinks import MetricSink
from nemo_rl_mcore.driver.observability.startup import STARTUP_PREFIX
from nemo_rl_mcore.driver.observability.timing import PhaseTimer

__all__ = [
    "STARTUP_PREFIX",
    "HistorySink",
    "Loggers",
    "MetricSink",
    "PhaseTimer",
    "ProgressDisplay",
    "RolloutSink",
    "RunFacts",
    "RunRecorder",
    "Sample",
    "finish_report",
    "print_report",
    "read_history",
    "read_rollouts",
]
