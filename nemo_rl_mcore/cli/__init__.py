"""The command `nemo-rl-mcore`.

Next to nothing is imported here: a signal is listened to from the first moment on.
"""

import gc
import sys
from collections.abc import Sequence
from types import TracebackType

from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.signals import stop_signals


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 2 when the recipe has problems, or that of the run."""

    def write_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        import traceback

        # The message may be what a model or an environment says.
        write_line(sys.stderr, "".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))

    if arguments is None:
        sys.excepthook = write_traceback
    with stop_signals() as signals:
        # Nothing that is imported and read before a run is garbage, and looking for it takes a tenth of the time of
        # `check`; `run_command` collects again when it has a plan.
        gc.disable()
        try:
            from nemo_rl_mcore.cli.commands import run_command

            return run_command(arguments)
        except KeyboardInterrupt:  # while the libraries load: later the run itself handles it
            write_line(sys.stderr, f"{signals.word} before the run began")
            return signals.exit_status
        finally:
            gc.enable()


if __name__ == "__main__":
    sys.exit(main())
