"""The errors that end a run with a message instead of a traceback."""


class RunStoppedError(RuntimeError):
    """A run cannot go on for a reason its user can act on; the message says what happened, where, and the remedy."""
