"""What a run shows and leaves behind: metric sinks, loggers, progress, timing, report."""

from nemo_rl_mcore.observability.loggers import Loggers, RunFacts
from nemo_rl_mcore.observability.progress import ProgressDisplay
from nemo_rl_mcore.observability.recorder import RunRecorder, finish_report
from nemo_rl_mcore.observability.report import HistorySink, print_report, read_history
from nemo_rl_mcore.observability.rollouts import RolloutSink, Sample, read_rollouts
from nemo_rl_mcore.observability.sinks import MetricSink
from nemo_rl_mcore.observability.startup import STARTUP_PREFIX
from nemo_rl_mcore.observability.timing import PhaseTimer

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
