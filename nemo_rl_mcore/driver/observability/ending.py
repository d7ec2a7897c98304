"""The end of a run or of a command over weights, as a shell and a person are told."""

from __future__ import annotations

import sys
from collections.abc import Callable

from nemo_rl_mcore.driver.output import say_aside, write_line
from nemo_rl_mcore.driver.signals import current_stop_signals, stop_signals
from nemo_rl_mcore.errors import RunStoppedError, run_stopped_by

EXIT_FAILED = 1
_LIMIT_KEY = "checkpointing.checkpoint_must_save_by"


def exit_status_of(error: BaseException | None) -> int:
    """0 for a whole run and one that its time limit ended, 1 for a failure, else what a signal asks for, as 130."""
    if isinstance(error, KeyboardInterrupt):
        # Not told by its class: Ray makes a plain one of each.
        status = current_stop_signals().exit_status
        return EXIT_FAILED if status == 0 and run_stopped_by(error) is not None else status
    return 0 if error is None else EXIT_FAILED


def exit_status(run: Callable[[], None], left_behind: Callable[[], str] = str) -> int:
    """Run to the end, to a failure or to a signal; say on stderr how it ended, and what it left.

    Returns 0, also where the time limit ended it, 1 for a failure, also one that the time limit came upon, and what a
    shell reports for a program that a signal ended: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP. What was
    left is `left_behind`, or what the notes of the exception say.
    """
    with stop_signals() as signals:
        try:
            run()
        except KeyboardInterrupt as stop:
            failure, status = run_stopped_by(stop), exit_status_of(stop)
            how = f"time is up ({_LIMIT_KEY})" if signals.exit_status == 0 else signals.word
            line = "; ".join(filter(None, [how, *getattr(stop, "__notes__", ()), left_behind()]))
            write_line(sys.stderr if status else sys.stdout, line)
            if failure is not None:
                say_aside(f"the run stopped: {failure}")
            return status
        except RunStoppedError as error:
            say_aside("\n".join([f"the run stopped: {error}", *getattr(error, "__notes__", ())]))
            return EXIT_FAILED
    return 0
