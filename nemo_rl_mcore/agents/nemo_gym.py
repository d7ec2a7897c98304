"""NeMo Gym: its servers beside the run, and its agents, which play sessions in place of commands.

Runs in the endpoint's asyncio loop. Gym has an environment of its own, with another Ray; `gym_servers` runs there, and
lines of JSON go to and fro. Gym passes on what is in the metadata of a row as fields of its calls of the model, and
there the endpoint finds the session.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast

from nemo_rl_mcore.agents.agents import SESSION_URL, AgentEnd, end_family
from nemo_rl_mcore.agents.requests import RunSampling
from nemo_rl_mcore.agents.session import Session
from nemo_rl_mcore.config.environment import GymConfig
from nemo_rl_mcore.data.row_readers import GYM_COLUMN
from nemo_rl_mcore.errors import RunStoppedError

PROGRAM = Path(__file__).with_name("gym_servers.py")
LOG_FILE, SESSIONS_FILE = "nemo_gym.log", "nemo_gym_sessions.jsonl"
_END_WITHIN_S, _LOOKS_EVERY_S = 15.0, 0.1
_LINE_BYTES = 1 << 24


@dataclass(frozen=True)
class GymSetup:
    """What Gym is started with.

    config: Gym's own. sampling: of the run. environment: of its processes. model: what it calls the policy.
    timeout_s: of a session. log_dir: of the run.
    """

    section: GymConfig
    config: Mapping[str, Any]
    sampling: RunSampling
    environment: Mapping[str, str]
    model: str
    timeout_s: float
    log_dir: Path


@dataclass(eq=False)
class NemoGym:
    """Plays sessions, all at once; see `nemo_gym`, which opens one."""

    setup: GymSetup
    process: Process
    _asked: dict[int, asyncio.Future[dict[str, Any]]] = field(
        default_factory=dict[int, "asyncio.Future[dict[str, Any]]"], init=False
    )
    _numbers: count[int] = field(default_factory=count, init=False)
    _ended: RunStoppedError | None = field(default=None, init=False)

    async def run(self, session: Session, url: str, task: Mapping[str, Any]) -> AgentEnd:
        """Have an agent of Gym's play the row of a session, and close that with its reward.

        task: with the row in `columns`. Raises RunStoppedError where the servers have ended.
        """
        number, told = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = told
        try:
            self._write({"number": number, "row": self._row_of(session, task)})
            async with asyncio.timeout(self.setup.timeout_s):
                answer = await told
        except TimeoutError:
            return AgentEnd(f"had no end within {self.setup.timeout_s:g} s (env.endpoint.timeout_s)")
        finally:
            del self._asked[number]
            # Where the servers have ended there is nothing to give up, and a cancellation stays one.
            if self._ended is None and (not told.done() or told.cancelled()):
                self._write({"number": number})
        return self._close(session, answer)

    def _row_of(self, session: Session, task: Mapping[str, Any]) -> dict[str, Any]:
        row = dict(cast("Mapping[str, Any]", task["columns"]))
        asked, sampling = dict(cast("Mapping[str, Any]", row[GYM_COLUMN])), self.setup.sampling
        metadata = dict(cast("Mapping[str, str]", asked.get("metadata") or {}))
        extra = json.loads(metadata.get("extra_body", "{}"))
        metadata["extra_body"] = json.dumps({**extra, "session": session.token})
        most = asked.get("max_output_tokens") or sampling.max_new_tokens
        asked |= {
            "metadata": metadata,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_output_tokens": min(most, sampling.max_new_tokens),
        }
        return {
            **row,
            GYM_COLUMN: asked,
            "_ng_task_index": task["index"],
            "_ng_rollout_index": task["sample"],
        }

    def _close(self, session: Session, answer: Mapping[str, Any]) -> AgentEnd:
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
        """Wait until the servers answer; raises RunStoppedError where they do not."""
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(self.setup.section.start_timeout_s):
                line = await self.process.stdout.readline()
        except TimeoutError as error:
            what = f"did not start within {self.setup.section.start_timeout_s:g} s"
            raise self._stopped(f"{what} (env.endpoint.gym.start_timeout_s)") from error
        if not line:
            raise self._stopped("did not start")

    async def hear(self) -> None:
        """Hand on answers until the program ends; then whoever waits is told."""
        reading = asyncio.ensure_future(self._read())
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

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            answer = json.loads(line)
            told = self._asked.get(answer["number"])
            if told is not None and not told.done():
                told.set_result(answer)

    def _stopped(self, what: str) -> RunStoppedError:
        return RunStoppedError(
            f"env.nemo_gym: the servers {what}; {self.setup.log_dir / LOG_FILE} has what they said",
            code="no-agent",
        )


@asynccontextmanager
async def nemo_gym(setup: GymSetup, url: str) -> AsyncGenerator[NemoGym]:
    """Run Gym's servers for as long as the block is open. url: of the endpoint.

    Raises RunStoppedError where they do not start.
    """
    setup.log_dir.mkdir(parents=True, exist_ok=True)
    mark = f"{url}/nemo-gym"
    process = await _start(setup, mark)
    gym = NemoGym(setup, process)
    hearing: asyncio.Task[None] | None = None
    try:
        settings = {
            "config": {**setup.config},
            "one_process": setup.section.one_process,
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


async def _start(setup: GymSetup, mark: str) -> Process:
    with (setup.log_dir / LOG_FILE).open("ab") as log:
        try:
            return await asyncio.create_subprocess_exec(
                *(setup.section.python, "-P", str(PROGRAM)),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env={**setup.environment, SESSION_URL: mark},
                start_new_session=True,
                limit=_LINE_BYTES,
            )
        except OSError as error:
            what = f"{setup.section.python!r} cannot be started: {error.strerror or error}"
            raise RunStoppedError(f"env.endpoint.gym.python: {what}", code="no-agent") from error


async def _exit(process: Process) -> None:
    """Wait for the program alone; `Process.wait` goes on while something it has started holds its output open."""
    while process.returncode is None:
        await asyncio.sleep(_LOOKS_EVERY_S)


async def _end(process: Process, mark: str, within_s: float) -> None:
    """Let the servers end by themselves for a while, and end what is left of them."""
    assert process.stdin is not None
    process.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await _exit(process)
    if process.returncode is None:
        with suppress(ProcessLookupError):  # it has just ended, and asyncio tells its status a turn later
            os.kill(process.pid, signal.SIGTERM)
    await asyncio.to_thread(end_family, process.pid, mark)
    await process.wait()
