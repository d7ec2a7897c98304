"""The command `nemo-rl-mcore`.

Imports are minimal here, so that signals are handled from the start.
"""

import gc
import sys
from collections.abc import Sequence
from types import TracebackType

from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.signals import STOPPED_BY, exit_status_of, stop_signals


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 2 if the recipe has problems, or the run's status."""

    def write_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        import traceback

        # The message may contain a model's or an environment's output.
        write_line(sys.stderr, "".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))

    if arguments is None:
        sys.excepthook = write_traceback
    with stop_signals() as signals:
        # Imports and reading before a run create no garbage, and collection would take a tenth of the time of
        # `check`; `run_command` turns it on again when it has a plan.
        gc.disable()
        try:
            from nemo_rl_mcore.cli.commands import run_command

            return run_command(arguments)
        except KeyboardInterrupt as stop:  # while the libraries load: later the run itself handles it
            status = exit_status_of(stop, signals)
            write_line(sys.stderr, f"{STOPPED_BY[status]} before the run began")
            return status
        finally:
            gc.enable()
