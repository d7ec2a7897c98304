"""Questions that are put to processes of their own, all at once, with one deadline: each may crash or hang alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from nemo_rl_mcore.tools.check import doctor_probes as probes

Question = tuple[str, ...]
"""A probe's name, and its arguments."""


@dataclass(frozen=True)
class Answer:
    """The facts that a process reported; failure: why not, or not all of them; late: it had no time to."""

    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    failure: str = ""
    late: bool = False


def ask(questions: Mapping[str, Question], deadline_s: float) -> dict[str, Answer]:
    """Return the answer to each question, after `deadline_s` at most; nothing of their processes is left."""
    ends_at = time.monotonic() + deadline_s
    asked: dict[str, _Child] = {}
    try:
        with _signals_held():
            for key, question in questions.items():
                asked[key] = _Child(question, deadline_s)
        return {key: child.answer(ends_at, deadline_s) for key, child in asked.items()}
    finally:
        for child in asked.values():
            child.end()


@contextmanager
def _signals_held() -> Generator[None]:
    """Let Ctrl-C wait: one between the start of a process and its place in a table would leave it behind."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Child:
    """A process that answers one question; its output goes to files, which nobody has to read while it runs."""

    def __init__(self, question: Question, deadline_s: float) -> None:
        # In memory: a full disk is among what is to be found.
        self._out, self._err = (os.fdopen(os.memfd_create(name), "w+b") for name in ("out", "err"))
        # -P: a folder in the working directory that has the name of a package is not that package.
        command = [sys.executable, "-P", str(Path(probes.__file__)), str(deadline_s), *question]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err, start_new_session=True
        )

    def answer(self, ends_at: float, deadline_s: float) -> Answer:
        try:
            status = self._process.wait(max(0.0, ends_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            return Answer(failure=f"no answer within {deadline_s:g} s (--timeout)", late=True)
        try:
            facts: dict[str, Any] = json.loads(_text(self._out))
        except ValueError:
            return Answer(failure=_how_it_ended(status, _text(self._err)))
        failure = facts.pop("failure", "")
        return Answer(facts, failure)

    def end(self) -> None:
        """Kill it with all that it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._out.close()
        self._err.close()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _how_it_ended(status: int, errors: str) -> str:
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    how = f"the process ended by {signal.Signals(-status).name}" if status < 0 else f"it exits with {status}"
    return f"{how}: {last}" if last else how
