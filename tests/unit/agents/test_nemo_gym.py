"""NeMo Gym beside a run: its rows are asked as its agents expect, and nothing of its servers stays.

The servers are a stand-in for the program that Gym's own Python runs; the nightly tests of agents have the real ones.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from fake_generation import until
from played_endpoint import LONGEST, MODEL, played
from processes import left_after
from refusals import refused

from nemo_rl_mcore.agents import agents as room
from nemo_rl_mcore.agents.agents import LOG_FILE, SESSIONS_FILE, GymSetup, nemo_gym
from nemo_rl_mcore.agents.session import SessionLimits
from nemo_rl_mcore.data.datasets import Prompt

STAND_IN = Path(__file__).with_name("gym_stand_in.py")
LIMITS = SessionLimits(4000, 4)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(room, "PROGRAM", STAND_IN)


@asynccontextmanager
async def gym_of(endpoint, folder, *, timeout_s=60.0, begins=""):
    setup = GymSetup(
        sys.executable,
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
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": "add 1 and 2"}], **asked},
        "does": does,
    }
    return {"index": 7, "sample": 2, "columns": row}


def open_session(endpoint):
    return endpoint.sessions.open(Prompt(7, "add 1 and 2", ""), 2, LIMITS, endpoint.model)


def lines_of(folder):
    """What the stand-in was asked."""
    return [json.loads(line) for line in (folder / LOG_FILE).read_text().splitlines()]


def ran(tokenizer, folder, *tasks, **others):
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
    [(ended, session)] = ran(tokenizer, tmp_path, task_of("plays", temperature=0.3, max_output_tokens=50))
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
    [(ended, session)] = ran(
        tokenizer, tmp_path, task_of("plays", metadata=metadata, max_output_tokens=10_000)
    )
    assert not ended.why
    [asked] = [line["row"]["responses_create_params"] for line in lines_of(tmp_path)]
    assert asked["metadata"]["source"] == "a"
    extra = json.loads(asked["metadata"]["extra_body"])
    assert extra == {"chat_template_kwargs": {"tone": "dry"}, "session": session.token}
    assert asked["max_output_tokens"] == LONGEST


def test_a_row_that_fails_has_no_reward_and_a_masked_one_is_not_tried_again(tokenizer, tmp_path):
    (failed, first), (masked, second) = ran(tokenizer, tmp_path, task_of("fails"), task_of("is masked"))
    assert failed.why
    assert failed.said == "no such tool"
    assert not failed.for_good
    assert masked.why
    assert masked.for_good
    assert first.reward is second.reward is None


def test_a_row_without_an_end_is_given_up(tokenizer, tmp_path):
    [(ended, _)] = ran(tokenizer, tmp_path, task_of("stays"), timeout_s=0.5)
    assert "env.endpoint.timeout_s" in ended.why
    asked, given_up = lines_of(tmp_path)
    assert given_up == {"number": asked["number"]}


def test_servers_that_die_end_the_run(tokenizer, tmp_path):
    with refused("no-agent"):
        ran(tokenizer, tmp_path, task_of("dies"), task_of("plays"))


@pytest.mark.parametrize("begins", ["never", "slowly"])
def test_servers_that_do_not_start_end_the_run(tokenizer, tmp_path, monkeypatch, begins):
    monkeypatch.setattr(room, "START_WITHIN_S", 1.0 if begins == "slowly" else 60.0)
    with refused("no-agent"):
        ran(tokenizer, tmp_path, begins=begins)


def test_servers_whose_end_asyncio_has_not_told_yet_end_the_run(tokenizer, tmp_path, monkeypatch):
    async def ready(gym):
        os.kill(gym.process.pid, signal.SIGKILL)
        os.waitpid(gym.process.pid, 0)
        assert gym.process.returncode is None
        raise gym._stopped("did not start")

    monkeypatch.setattr(room.NemoGym, "ready", ready)
    with refused("no-agent"):
        ran(tokenizer, tmp_path)


def test_what_servers_have_started_ends_with_them(tokenizer, tmp_path, monkeypatch):
    heard = []

    async def ready(gym):
        heard.append(json.loads(await gym.process.stdout.readline()))

    monkeypatch.setattr(room.NemoGym, "ready", ready)
    ran(tokenizer, tmp_path, task_of("plays"))
    child = Path(f"/proc/{heard[0]['child']}")
    until(lambda: not child.exists() or (child / "stat").read_text().split()[2] == "Z")


def test_without_an_interpreter_the_run_says_so(tokenizer, tmp_path):
    async def run():
        async with played(tokenizer) as endpoint:
            setup = GymSetup(
                str(tmp_path / "none"),
                False,
                {},
                endpoint.options.sampling,
                {},
                MODEL,
                1.0,
                tmp_path,
            )
            async with nemo_gym(setup, endpoint.address.url):
                pass

    with refused("no-agent"):
        asyncio.run(run())


DRIVER = """
import asyncio, os, sys
from pathlib import Path
from nemo_rl_mcore.agents import agents as room
from nemo_rl_mcore.agents.requests import RunSampling
from nemo_rl_mcore.driver.actors.cluster import marked_processes

async def serve(mark):
    given = {'PATH': os.environ['PATH'], **mark}
    sampling, folder = RunSampling(1.0, 1.0, None, 8), Path(sys.argv[2])
    setup = room.GymSetup(sys.executable, False, {}, sampling, given, 'policy', 60.0, folder)
    async with room.nemo_gym(setup, 'http://127.0.0.1:1') as gym:
        print(gym.process.pid, flush=True)
        await asyncio.sleep(600)

room.PROGRAM = Path(sys.argv[1])
with marked_processes() as mark:
    asyncio.run(serve(mark))
"""


@pytest.mark.stage("processes")
def test_servers_end_after_a_driver_that_was_killed(tmp_path):
    command = [sys.executable, "-c", DRIVER, str(STAND_IN), str(tmp_path)]
    paths = os.pathsep.join(sys.path)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as driver:
        server = psutil.Process(int(driver.stdout.readline()))
        pids = [server.pid, *(child.pid for child in server.children())]
        driver.kill()
    assert len(pids) == 2
    assert left_after(10, pids) == []
