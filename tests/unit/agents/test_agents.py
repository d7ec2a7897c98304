"""Processes of agents: how they are told their task, how they end, and that nothing of them stays."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import left_after, within
from refusals import refused
from scripted_engine import Drawing

from nemo_rl_mcore.agents.agents import Agents
from nemo_rl_mcore.agents.session import SessionLimits, Sessions
from nemo_rl_mcore.data.datasets import Prompt

LIMITS = SessionLimits(context=40, calls=4)


def ran(code, *, timeout_s=30.0, close_after=None):
    async def play():
        session = Sessions().open(Prompt(4, "", ""), 0, LIMITS, Drawing())
        agents = Agents([sys.executable, "-ISc", code], {"PATH": os.environ["PATH"]}, 2, timeout_s)
        if close_after is not None:
            asyncio.get_running_loop().call_later(close_after, session.close, 1.0)
        return await agents.run(session, "http://127.0.0.1:1", {"prompt": "12>"}), session

    return asyncio.run(play())


def test_an_agent_is_told_its_task_and_where_to_call():
    code = (
        "import json, os, sys\n"
        "task = json.load(sys.stdin)\n"
        "print(task['prompt'], os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY'], sorted(os.environ))"
    )
    ended, session = ran(code)
    assert not ended.why
    assert ended.said.startswith(f"12> http://127.0.0.1:1/sessions/{session.token}/v1 {session.token} ")
    assert "HOME" not in ended.said


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("print('bad'); raise SystemExit(3)", "exited with 3"),
        ("import os; os.kill(os.getpid(), 9)", "ended by signal 9"),
    ],
)
def test_an_agent_that_fails_says_how(code, why):
    assert ran(code)[0].why == why


CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, '-ISc', 'import time; time.sleep(600)'], {options})
print(child.pid, flush=True)
{then}
"""
BY_ITSELF = (
    "start_new_session=True"  # as shells of agents run a command, to end all of it at its own deadline
)


@pytest.mark.parametrize(
    ("options", "then", "why"),
    [
        ("", "time.sleep(600)", "env.endpoint.timeout_s"),
        (BY_ITSELF, "time.sleep(600)", "env.endpoint.timeout_s"),
        (f"{BY_ITSELF}, env={{}}", "time.sleep(600)", "env.endpoint.timeout_s"),
        (BY_ITSELF, "", ""),
    ],
    ids=["group", "session", "environment", "left behind"],
)
@pytest.mark.stage("processes")
def test_an_agent_is_ended_with_all_that_it_started(caplog, options, then, why):
    ended, _ = ran(CHILD.format(options=options, then=then), timeout_s=2.0 if then else 30.0)
    assert why in ended.why
    assert caplog.records == [], "asyncio has heard of the agent's end"
    assert left_after(5, [int(ended.said)]) == [], "what the agent started lives on"


DRIVER = """
import asyncio, os, sys
from scripted_engine import Drawing
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.agents.agents import Agents
from nemo_rl_mcore.agents.session import Sessions
from nemo_rl_mcore.agents.session import SessionLimits
from nemo_rl_mcore.driver.actors.cluster import marked_processes

with marked_processes() as mark:
    agents = Agents([sys.executable, '-ISc', sys.argv[1]], {'PATH': os.environ['PATH'], **mark}, 2, 600.0)
    session = Sessions().open(Prompt(4, '', ''), 0, SessionLimits(40, 4), Drawing())
    asyncio.run(agents.run(session, 'http://127.0.0.1:1', {}))
"""
LEAVES_PROCESSES = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pids = [os.getpid(), subprocess.Popen(['sleep', '600'], env={}, start_new_session=True).pid]
told, tells = os.pipe()
if not os.fork():
    os.setsid()
    if daemon := os.fork():
        os.write(tells, b'%d' % daemon)
        os._exit(0)
    os.closerange(0, 10)
    time.sleep(600)
os.wait()
pids.append(int(os.read(told, 20)))
with open(%r, 'w') as file:
    file.write(' '.join(map(str, pids)) + '\\n')
time.sleep(600)
"""


@pytest.mark.stage("processes")
def test_agents_and_what_they_started_end_after_a_driver_that_was_killed(tmp_path):
    written = tmp_path / "pids"
    tests = Path(__file__).parents[2]
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, LEAVES_PROCESSES.replace("%r", repr(str(written)))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tests)])},
    )
    try:
        assert within(60, lambda: written.exists() and written.read_text().endswith("\n"))
    finally:
        driver.kill()
        driver.wait()
    pids = [int(pid) for pid in written.read_text().split()]
    assert left_after(10, pids) == []


def test_an_agent_that_says_much_and_reads_nothing_is_not_held_up():
    ended, _ = ran("import sys; sys.stdin.close(); print('x' * 1_000_000)")
    assert not ended.why
    assert len(ended.said) <= 200


def test_a_closed_session_ends_its_agent():
    before = time.monotonic()
    ended, session = ran("import time; time.sleep(600)", close_after=0.1)
    assert not ended.why
    assert session.reward == 1.0
    assert time.monotonic() - before < 60


def test_a_program_that_is_not_there_ends_the_run():
    async def play():
        session = Sessions().open(Prompt(4, "", ""), 0, LIMITS, Drawing())
        await Agents(["/no/such/agent"], {}, 1, 5.0).run(session, "", {})

    with refused("no-agent", "env.endpoint.command", "'/no/such/agent'"):
        asyncio.run(play())
