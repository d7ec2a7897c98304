"""Processes of agents: how they are told their task, how they end, and that nothing of them stays."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fake_generation import until
from played_endpoint import LONGEST, MODEL, played
from processes import left_after, within
from refusals import refused
from scripted_engine import Drawing

from nemo_rl_mcore.agents import agents as room
from nemo_rl_mcore.agents.agents import LOG_FILE, SESSIONS_FILE, Agents, GymSetup, nemo_gym
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


STAND_IN = Path(__file__).with_name("gym_stand_in.py")
GYM_LIMITS = SessionLimits(4000, 4)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(room, "PROGRAM", STAND_IN)


@asynccontextmanager
async def gym_of(endpoint, folder, *, timeout_s=60.0, begins="", python=sys.executable):
    setup = GymSetup(
        python,
        False,
        {"config_paths": ["a.yaml"]},
        endpoint.options.sampling,
        {"PATH": os.environ["PATH"], "BEGINS": begins},
        MODEL,
        timeout_s,
        folder,
    )
    async with nemo_gym(setup, endpoint.address.url) as gym:
        yield gym


def task_of(does, **asked):
    created = {"input": [{"role": "user", "content": "add 1 and 2"}], **asked}
    return {"index": 7, "sample": 2, "columns": {"responses_create_params": created, "does": does}}


def open_session(endpoint):
    return endpoint.sessions.open(Prompt(7, "add 1 and 2", ""), 2, GYM_LIMITS, endpoint.model)


def lines_of(folder):
    """What the stand-in was asked."""
    return [json.loads(line) for line in (folder / LOG_FILE).read_text().splitlines()]


def played_rows(tokenizer, folder, *tasks, **others):
    async def run():
        async with played(tokenizer) as endpoint, gym_of(endpoint, folder, **others) as gym:
            sessions = [open_session(endpoint) for _ in tasks]
            url = endpoint.address.url
            return [
                (await gym.run(session, url, task), session)
                for session, task in zip(sessions, tasks, strict=True)
            ]

    return asyncio.run(run())


def test_a_row_is_played_and_its_reward_closes_the_session(tokenizer, tmp_path):
    [(ended, session)] = played_rows(
        tokenizer, tmp_path, task_of("plays", temperature=0.3, max_output_tokens=50)
    )
    assert not ended.why
    assert session.closed.is_set()
    assert (session.reward, session.rewards) == (0.25, {"right": 0.5})
    assert len(session.calls) == 1
    [asked] = [line["row"] for line in lines_of(tmp_path)]
    assert (asked["_ng_task_index"], asked["_ng_rollout_index"]) == (7, 2)
    created = asked["responses_create_params"]
    assert (created["temperature"], created["top_p"], created["max_output_tokens"]) == (1.0, 0.9, 50)
    [told] = [json.loads(line) for line in (tmp_path / SESSIONS_FILE).read_text().splitlines()]
    assert told["calls"] == told["recorded_calls"] == 1
    assert told["tokens"] == len(session.calls[0].answer_N)


def test_what_a_row_says_already_stays(tokenizer, tmp_path):
    metadata = {"extra_body": json.dumps({"chat_template_kwargs": {"tone": "dry"}}), "source": "a"}
    [(ended, session)] = played_rows(
        tokenizer, tmp_path, task_of("plays", metadata=metadata, max_output_tokens=10_000)
    )
    assert not ended.why
    [asked] = [line["row"]["responses_create_params"] for line in lines_of(tmp_path)]
    assert asked["metadata"]["source"] == "a"
    extra = json.loads(asked["metadata"]["extra_body"])
    assert extra == {"chat_template_kwargs": {"tone": "dry"}, "session": session.token}
    assert asked["max_output_tokens"] == LONGEST


def test_a_row_that_fails_has_no_reward_and_a_masked_one_is_not_tried_again(tokenizer, tmp_path):
    (failed, first), (masked, second) = played_rows(
        tokenizer, tmp_path, task_of("fails"), task_of("is masked")
    )
    assert failed.why
    assert failed.said == "no such tool"
    assert not failed.for_good
    assert masked.why
    assert masked.for_good
    assert first.reward is second.reward is None


def test_a_row_without_an_end_is_given_up(tokenizer, tmp_path):
    [(ended, _)] = played_rows(tokenizer, tmp_path, task_of("stays"), timeout_s=0.5)
    assert "env.endpoint.timeout_s" in ended.why
    asked, given_up = lines_of(tmp_path)
    assert given_up == {"number": asked["number"]}


@pytest.mark.parametrize(
    ("rows", "how"),
    [
        (["dies", "plays"], {}),
        ([], {"begins": "never"}),
        ([], {"begins": "slowly"}),
        ([], {"python": "/no/such/python"}),
    ],
)
def test_servers_that_die_or_do_not_start_end_the_run(tokenizer, tmp_path, monkeypatch, rows, how):
    if how.get("begins") == "slowly":
        monkeypatch.setattr(room, "START_WITHIN_S", 1.0)
    with refused("no-agent"):
        played_rows(tokenizer, tmp_path, *map(task_of, rows), **how)


def test_servers_whose_end_asyncio_has_not_told_yet_end_the_run(tokenizer, tmp_path, monkeypatch):
    async def ready(gym):
        os.kill(gym.process.pid, signal.SIGKILL)
        os.waitpid(gym.process.pid, 0)
        assert gym.process.returncode is None
        raise gym._stopped("did not start")

    monkeypatch.setattr(room.NemoGym, "ready", ready)
    with refused("no-agent"):
        played_rows(tokenizer, tmp_path)


def test_what_servers_have_started_ends_with_them(tokenizer, tmp_path, monkeypatch):
    heard = []

    async def ready(gym):
        heard.append(json.loads(await gym.process.stdout.readline()))

    monkeypatch.setattr(room.NemoGym, "ready", ready)
    played_rows(tokenizer, tmp_path, task_of("plays"))
    child = Path(f"/proc/{heard[0]['child']}")
    until(lambda: not child.exists() or (child / "stat").read_text().split()[2] == "Z")
