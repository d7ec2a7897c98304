"""How a run has ended, as a shell is told."""

from __future__ import annotations

from nemo_rl_mcore.errors import run_stopped_by
from nemo_rl_mcore.signals import current_stop_signals

EXIT_FAILED = 1


def exit_status_of(error: BaseException | None) -> int:
    """0 for a whole run and one that its time limit ended, 1 for a failure, else what a signal asks for, as 130.

    A failure that the time limit came upon is one.
    """
    if isinstance(error, KeyboardInterrupt):
        # Not told by its class: Ray makes a plain one of each.
        status = current_stop_signals().exit_status
        return EXIT_FAILED if status == 0 and run_stopped_by(error) is not None else status
    return 0 if error is None else EXIT_FAILED
