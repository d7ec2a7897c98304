"""Agents: a user's process per session, which calls the model until its task is done, or NeMo Gym.

Runs in the endpoint's asyncio loop. An agent reads its task from standard input and the endpoint's URL from its
environment. Gym has its own Python environment, with another Ray: `gym_servers` runs there, and the two processes
exchange lines of JSON. Gym copies a row's metadata into its calls of the model, where the endpoint finds the session.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, cast

import psutil

from nemo_rl_mcore.agents.requests import RunSampling
from nemo_rl_mcore.agents.session import Session
from nemo_rl_mcore.data.rows import GYM_COLUMN
from nemo_rl_mcore.errors import RunStoppedError

START_WITHIN_S = 1800.0
"""Time for NeMo Gym's servers to start; Gym may install packages for them."""
_GRACE_S = 2.0
"""Time for an agent to exit after it has closed its session."""
_DIES_WITHIN_S = 1.0
_ROUNDS = 10
SESSION_URL = "NEMO_RL_SESSION_URL"
"""The environment variable that marks an agent's processes."""
_SHOWN_BYTES = 200
PROGRAM = Path(__file__).with_name("gym_servers.py")
LOG_FILE, SESSIONS_FILE = "nemo_gym.log", "nemo_gym_sessions.jsonl"
_END_WITHIN_S, _LOOKS_EVERY_S = 15.0, 0.1
_LINE_BYTES = 1 << 24


@dataclass(frozen=True)
class AgentEnd:
    """The outcome of an agent's process.

    why: empty after exit code 0 or a closed session. said: the last output. for_good: True if a retry would fail too.
    """

    why: str = ""
    said: str = ""
    for_good: bool = False


class Agents:
    """Runs `command` once per session, with at most `processes` running at a time.

    environment: the variables that all processes get. timeout_s: limit for each process, counted from its start.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], processes: int, timeout_s: float
    ) -> None:
        self.command, self.environment, self.timeout_s = command, environment, timeout_s
        self._room = asyncio.Semaphore(processes)

    async def run(self, session: Session, url: str, task: Mapping[str, Any]) -> AgentEnd:
        """Run an agent until its session is closed or it exits, then end all processes that it has started.

        url: the endpoint's URL. task: the agent's input. Raises RunStoppedError if the program does not start.
        """
        # Files, not pipes: the agent never waits for a reader, and its output never delays the loop's end.
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
        given = {"OPENAI_BASE_URL": f"{own}/v1", "OPENAI_API_KEY": session.token, SESSION_URL: own}
        try:
            return await asyncio.create_subprocess_exec(
                *self.command,
                stdin=told,
                stdout=said,
                stderr=STDOUT,
                env={**self.environment, **given},
                start_new_session=True,  # so that its child processes end with it
            )
        except OSError as error:
            what = f"{self.command[0]!r} cannot be started: {error.strerror or error}"
            raise RunStoppedError(f"env.endpoint.command: {what}", code="no-agent") from error


async def _ended(session: Session, process: Process) -> str:
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
    """Wait for a coroutine without passing on a cancellation; raise CancelledError afterwards instead."""
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
    """Wait until an agent has started, then end it and all processes that it has started."""
    with suppress(RunStoppedError):  # it never started
        process = await starting
        await asyncio.to_thread(end_family, process.pid, token)
        await process.wait()


def end_family(agent: int, token: str) -> None:
    """End an agent, its descendants, and all processes with its token in their environment.

    An agent's shell may start commands in a new session; killing the agent's process group does not reach those.
    """
    family = set[psutil.Process]()
    with suppress(psutil.Error):
        family |= {*psutil.Process(agent).children(recursive=True)}
    with suppress(ProcessLookupError):  # the whole group has ended
        os.killpg(agent, signal.SIGKILL)
    for _ in range(_ROUNDS):  # a process may start another just before it is killed
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):  # ended, or another user's
                if token in process.environ().get(SESSION_URL, ""):
                    family.add(process)
        running: list[psutil.Process] = []
        for one in family:
            with suppress(psutil.Error):
                # asyncio waits for the agent process itself.
                if one.pid != agent and one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                    running.append(one)
        if not running:
            return
        for one in running:
            with suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(running, timeout=_DIES_WITHIN_S)


@dataclass(frozen=True)
class GymSetup:
    """Arguments for Gym's servers.

    python: the interpreter in Gym's environment. config: Gym's configuration. sampling, log_dir: as in the run.
    environment: variables for Gym's processes. model: Gym's name for the policy. timeout_s: limit for a session.
    """

    python: str
    one_process: bool
    config: Mapping[str, Any]
    sampling: RunSampling
    environment: Mapping[str, str]
    model: str
    timeout_s: float
    log_dir: Path


class NemoGym:
    """Plays sessions, all at once; opened by `nemo_gym`."""

    def __init__(self, setup: GymSetup, process: Process) -> None:
        self.setup, self.process = setup, process
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = count()
        self._ended: RunStoppedError | None = None

    async def run(self, session: Session, url: str, task: Mapping[str, Any]) -> AgentEnd:
        """Let Gym's agent play a session's row, and close the session with the reward.

        task: holds the row in `columns`. Raises RunStoppedError once the servers have ended.
        """
        row, sampling = dict(cast("Mapping[str, Any]", task["columns"])), self.setup.sampling
        number, heard = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = heard
        try:
            asked = dict(cast("Mapping[str, Any]", row[GYM_COLUMN]))
            metadata = dict(cast("Mapping[str, str]", asked.get("metadata") or {}))
            extra = json.loads(metadata.get("extra_body", "{}"))
            metadata["extra_body"] = json.dumps({**extra, "session": session.token})
            most = asked.get("max_output_tokens") or sampling.max_new_tokens
            asked |= {"metadata": metadata, "max_output_tokens": min(most, sampling.max_new_tokens)}
            asked |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
            row |= {GYM_COLUMN: asked, "_ng_task_index": task["index"], "_ng_rollout_index": task["sample"]}
            self._write({"number": number, "row": row})
            async with asyncio.timeout(self.setup.timeout_s):
                answer = await heard
        except TimeoutError:
            return AgentEnd(f"had no end within {self.setup.timeout_s:g} s (env.endpoint.timeout_s)")
        finally:
            del self._asked[number]
            # Once the servers have ended there is no row to give up.
            if self._ended is None and (not heard.done() or heard.cancelled()):
                self._write({"number": number})
        if "error" in answer:
            return AgentEnd(f"failed in NeMo Gym: {answer['error']}", str(answer["said"]))
        if answer["masked"]:
            return AgentEnd("had its sample masked by NeMo Gym", for_good=True)
        told = {"index": session.prompt.index, "sample": session.sample, "recorded_calls": len(session.calls)}
        told |= {name: answer[name] for name in ("reward", "rewards", "calls", "tokens", "tool_calls")}
        with (self.setup.log_dir / SESSIONS_FILE).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(told)}\n")
        if not session.closed.is_set():
            session.close(float(answer["reward"]), {**answer["rewards"]})
        return AgentEnd()

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._ended is not None:
            raise self._ended
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line, default=str).encode() + b"\n")

    async def ready(self) -> None:
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(START_WITHIN_S):
                line = await self.process.stdout.readline()
        except TimeoutError as error:
            raise self._stopped(f"did not start within {START_WITHIN_S:g} s") from error
        if not line:
            raise self._stopped("did not start")

    async def hear(self) -> None:
        """Pass on answers until the program ends, then raise an error in all waiting sessions."""

        async def read() -> None:
            assert self.process.stdout is not None
            while line := await self.process.stdout.readline():
                answer = json.loads(line)
                told = self._asked.get(answer["number"])
                if told is not None and not told.done():
                    told.set_result(answer)

        reading = asyncio.ensure_future(read())
        exits = asyncio.ensure_future(_exit(self.process))
        try:
            await asyncio.wait((reading, exits), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            exits.cancel()
        self._ended = self._stopped("ended")
        for told in self._asked.values():
            if not told.done():
                told.set_exception(self._ended)

    def _stopped(self, what: str) -> RunStoppedError:
        return RunStoppedError(
            f"env.nemo_gym: the servers {what}; {self.setup.log_dir / LOG_FILE} has what they said",
            code="no-agent",
        )


@asynccontextmanager
async def nemo_gym(setup: GymSetup, url: str) -> AsyncGenerator[NemoGym]:
    """Run Gym's servers inside the block. url: the endpoint's URL. Raises RunStoppedError if they do not start."""
    setup.log_dir.mkdir(parents=True, exist_ok=True)
    mark = f"{url}/nemo-gym"
    with (setup.log_dir / LOG_FILE).open("ab") as log:
        try:
            process = await asyncio.create_subprocess_exec(
                *(setup.python, "-P", str(PROGRAM)),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env={**setup.environment, SESSION_URL: mark},
                start_new_session=True,
                limit=_LINE_BYTES,
            )
        except OSError as error:
            what = f"{setup.python!r} cannot be started: {error.strerror or error}"
            raise RunStoppedError(f"env.endpoint.command: {what}", code="no-agent") from error
    gym = NemoGym(setup, process)
    hearing: asyncio.Task[None] | None = None
    try:
        settings = {
            "config": {**setup.config},
            "one_process": setup.one_process,
            "policy_base_url": f"{url}/v1",
            "policy_model_name": setup.model,
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        await gym.ready()
        hearing = asyncio.ensure_future(gym.hear())
        yield gym
    finally:
        if hearing is not None:
            hearing.cancel()
        await _end(process, mark, _END_WITHIN_S if hearing is not None else 0.0)


async def _exit(process: Process) -> None:
    """Wait for the program alone; `Process.wait` also waits for descendants that hold its output open."""
    while process.returncode is None:
        await asyncio.sleep(_LOOKS_EVERY_S)


async def _end(process: Process, mark: str, within_s: float) -> None:
    """Give the servers time to exit, then end the remaining processes."""
    assert process.stdin is not None
    process.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await _exit(process)
    if process.returncode is None:
        with suppress(ProcessLookupError):  # it has just ended; asyncio sets the status later
            os.kill(process.pid, signal.SIGTERM)
    await asyncio.to_thread(end_family, process.pid, mark)
    await process.wait()
