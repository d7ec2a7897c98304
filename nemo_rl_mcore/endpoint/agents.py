"""Agents: a process of the user's for each session, which calls the model until it has done its task.

Runs in the endpoint's asyncio loop. An agent gets its task on its standard input, and where to call from its
environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_mcore.endpoint.session import Session
from nemo_rl_mcore.errors import RunStoppedError

_GRACE_S = 5.0
"""For an agent that has closed its session to exit by itself."""
_KEPT_BYTES, _SHOWN_CHARS = 4096, 200


@dataclass(frozen=True)
class Ended:
    """How an agent ended: why is empty for one that exited with 0 or closed its session. said: its last output."""

    why: str = ""
    said: str = ""


@dataclass(eq=False)
class Agents:
    """Runs `command` for sessions, `processes` at once.

    environment: of their processes, besides what is of a session. timeout_s: of each, from its start.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    processes: int
    timeout_s: float
    _room: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.processes)

    async def run(self, session: Session, url: str, task: Mapping[str, Any]) -> Ended:
        """Run an agent until its session is closed or it exits, and end all that it has started.

        url: of the endpoint. task: what it is told. Raises RunStoppedError where the program cannot be started.
        """
        async with self._room:
            process = await self._start(session, url)
            said = bytearray()
            reading = asyncio.ensure_future(
                _talk(process, json.dumps(task, default=str).encode() + b"\n", said)
            )
            try:
                async with asyncio.timeout(self.timeout_s):
                    why = await _ended(session, process)
            except TimeoutError:
                why = f"no end within {self.timeout_s:g} s (env.endpoint.timeout_s)"
            finally:
                _kill(process)
                reading.cancel()
                await process.wait()
            return Ended(why, said.decode(errors="replace").strip()[-_SHOWN_CHARS:])

    async def _start(self, session: Session, url: str) -> Process:
        own = f"{url}/sessions/{session.token}"
        given = {
            "OPENAI_BASE_URL": f"{own}/v1",
            "OPENAI_API_KEY": session.token,
            "NEMO_RL_SESSION_URL": own,
        }
        try:
            return await asyncio.create_subprocess_exec(
                *self.command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=STDOUT,
                env={**self.environment, **given},
                start_new_session=True,  # what it starts is ended with it
            )
        except OSError as error:
            raise RunStoppedError(
                f"env.endpoint.command: {self.command[0]!r} cannot be started: {error.strerror or error}",
                code="no-agent",
            ) from error


async def _ended(session: Session, process: Process) -> str:
    """Wait for either end; return why the agent has not done its task, if it has not."""
    exits = asyncio.ensure_future(process.wait())
    closes = asyncio.ensure_future(session.closed.wait())
    try:
        await asyncio.wait((exits, closes), return_when=asyncio.FIRST_COMPLETED)
        if session.closed.is_set():
            await asyncio.wait((exits,), timeout=_GRACE_S)
            return ""
        code = exits.result()
        return "" if code == 0 else f"ended by signal {-code}" if code < 0 else f"exited with {code}"
    finally:
        exits.cancel()
        closes.cancel()


async def _talk(process: Process, task: bytes, said: bytearray) -> None:
    """Give an agent its task, and keep the end of what it says: a full pipe would hold it up."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # it does not read it
        process.stdin.write(task)
        await process.stdin.drain()
        process.stdin.close()
    while chunk := await process.stdout.read(_KEPT_BYTES):
        said += chunk
        del said[:-_KEPT_BYTES]


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):  # it and all that it started have ended
        os.killpg(process.pid, signal.SIGKILL)
