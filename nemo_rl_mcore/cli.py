"""The command `nemo-rl-mcore`.

Next to nothing is imported here: a signal is listened to from the first moment on.
"""

import sys
from collections.abc import Sequence

from nemo_rl_mcore.output import write_line
from nemo_rl_mcore.signals import stop_signals


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 2 when the recipe has problems, or that of the run."""
    with stop_signals() as signals:
        try:
            from nemo_rl_mcore.commands import run_command

            return run_command(arguments)
        except KeyboardInterrupt:  # while the libraries load: later the run itself handles it
            write_line(sys.stderr, f"{signals.word} before the run began")
            return signals.exit_status


if __name__ == "__main__":
    sys.exit(main())
