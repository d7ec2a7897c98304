"""Agents: a process of the user's for each session, which calls the model until it has done its task.

Runs in the endpoint's asyncio loop. An agent gets its task on its standard input, and where to call from its
environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import STDOUT, Process
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import IO, Any

import psutil

from nemo_rl_mcore.agents.session import Session
from nemo_rl_mcore.errors import RunStoppedError

_GRACE_S = 2.0
"""For an agent that has closed its session to exit by itself."""
_DIES_WITHIN_S = 1.0
_ROUNDS = 10
SESSION_URL = "NEMO_RL_SESSION_URL"
"""The variable by which what an agent has started is found."""
_SHOWN_BYTES = 200


@dataclass(frozen=True)
class AgentEnd:
    """How an agent ended: why is empty for one that exited with 0 or closed its session. said: its last output.

    for_good: another try would end alike.
    """

    why: str = ""
    said: str = ""
    for_good: bool = False


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

    async def run(self, session: Session, url: str, task: Mapping[str, Any]) -> AgentEnd:
        """Run an agent until its session is closed or it exits, and end all that it has started.

        url: of the endpoint. task: what it is told. Raises RunStoppedError where the program cannot be started.
        """
        # Files, not pipes: nobody has to read on for it to go on, and nothing of it holds the loop's end up.
        async with self._room:
            with TemporaryFile() as told, TemporaryFile() as said:
                told.write(json.dumps(task, default=str).encode() + b"\n")
                told.seek(0)
                starting = asyncio.ensure_future(self._start(session, url, told, said))
                try:
                    process = await asyncio.shield(starting)
                    async with asyncio.timeout(self.timeout_s):
                        why = await _ended(session, process)
                except TimeoutError:
                    why = f"no end within {self.timeout_s:g} s (env.endpoint.timeout_s)"
                finally:
                    await _to_its_end(_kill(starting, session.token))
                said.seek(max(0, said.seek(0, os.SEEK_END) - _SHOWN_BYTES))
                return AgentEnd(why, said.read().decode(errors="replace").strip())

    async def _start(self, session: Session, url: str, told: IO[bytes], said: IO[bytes]) -> Process:
        own = f"{url}/sessions/{session.token}"
        given = {
            "OPENAI_BASE_URL": f"{own}/v1",
            "OPENAI_API_KEY": session.token,
            SESSION_URL: own,
        }
        try:
            return await asyncio.create_subprocess_exec(
                *self.command,
                stdin=told,
                stdout=said,
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


async def _to_its_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Wait for a coroutine that no cancellation breaks off."""
    task, cancelled = asyncio.ensure_future(coroutine), False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    task.result()


async def _kill(starting: asyncio.Task[Process], token: str) -> None:
    """End an agent with all that it has started; one that is just being started, too."""
    with suppress(RunStoppedError):  # it never was
        process = await starting
        await asyncio.to_thread(end_family, process.pid, token)
        await process.wait()


def end_family(agent: int, token: str) -> None:
    """End an agent, what is below it, and what has its token in its environment, in whatever group or session it is.

    A shell of an agent puts a command into a session of its own, where the end of the agent's group does not reach it.
    """
    family = set[psutil.Process]()
    with suppress(psutil.Error):
        family |= {*psutil.Process(agent).children(recursive=True)}
    with suppress(ProcessLookupError):  # it and all of its group have ended
        os.killpg(agent, signal.SIGKILL)
    for _ in range(_ROUNDS):  # what is killed may just have started another one
        # The agent itself is left to asyncio, which waits for it.
        family = {one for one in family | _marked(token) if one.pid != agent and _still_runs(one)}
        if not family:
            return
        for one in family:
            with suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(family, timeout=_DIES_WITHIN_S)


def _marked(token: str) -> set[psutil.Process]:
    found = set[psutil.Process]()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or is another user's
            if token in process.environ().get(SESSION_URL, ""):
                found.add(process)
    return found


def _still_runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
