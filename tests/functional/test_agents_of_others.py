"""Agent stacks of others train, by the commands that docs/environments.md has below the heading of each."""

import json
import os
import re
import socket
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from doc_pages import BLOCK, PAGES, REPO
from processes import ProcessWatch

from nemo_rl_mcore.driver.observability import read_rollouts

pytestmark = pytest.mark.nightly

UNREACHABLE = re.compile(
    r"error sending request|dns error|failed to lookup address|Connection refused|timed out", re.I
)
INSTALLS = ("uv venv ", "uv pip install ")
BUILT_WITHIN_S, RUN_WITHIN_S = 1200, 3600
SAMPLES = 4
PORT = "8123"
"""In the commands of the page: any other one does."""


@dataclass(frozen=True)
class Trained:
    """What a session was trained on, by the rows of it that are on disk."""

    calls: int
    tokens: int
    reward: float


def commands_of(stack):
    """Return the commands of a stack's section: those that build its environment, and those that train."""
    [section] = [
        part for part in PAGES["docs/environments.md"].split("\n### ") if f" {stack} results/" in part
    ]
    text = "".join(match[2] for match in BLOCK.finditer(section) if match[1] == "bash")
    commands = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    built = [line for line in commands if line.startswith(INSTALLS)]
    return built, [line for line in commands if line not in built]


@pytest.fixture
def place(tmp_path):
    """Return a folder that looks like the repository to the commands."""
    (REPO / "build").mkdir(exist_ok=True)
    for name in ("examples", "build", ".python-version"):
        if (REPO / name).exists():
            (tmp_path / name).symlink_to(REPO / name)
    return tmp_path


def build(commands, place):
    for command in commands:
        done = subprocess.run(
            command, shell=True, cwd=place, capture_output=True, text=True, timeout=BUILT_WITHIN_S
        )
        if done.returncode and UNREACHABLE.search(done.stderr):
            pytest.skip(f"the package registry cannot be reached: {command}")
        assert done.returncode == 0, (command, done.stderr)


def run(command, place):
    """Run a command in this environment, until nothing of it lives any more; return what it says."""
    watch = ProcessWatch()
    process = subprocess.Popen(
        ["bash", "-c", command.replace("uv run ", "")],
        cwd=place,
        env=os.environ | watch.environment | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    watch.follow(process.pid)
    try:
        said, _ = process.communicate(timeout=RUN_WITHIN_S)
        assert process.returncode == 0, (command, said[-3000:])
        assert watch.all_gone(within_s=30), watch.alive()
    finally:
        watch.kill_all()
    return said


def trained_in(folder):
    rows = defaultdict(list)
    for path in sorted((folder / "rollouts").glob("step_*.jsonl.gz")):
        for row in read_rollouts(path):
            assert row["sample_mask"] == 1
            rows[row["prompt_index"], row["sample_index"]].append(row)
    return {key: _trained(of_session) for key, of_session in rows.items()}


def _trained(rows):
    [reward] = {row["reward"] for row in rows}
    # A row of a recipe of one turn does not list it.
    calls = sum(
        sum(one["role"] == "assistant" for one in row["turns"] or [{"role": "assistant"}]) for row in rows
    )
    return Trained(calls, sum(row["response_tokens"] for row in rows), reward)


@pytest.mark.parametrize("stack", ["openai_agents", "mini_swe_agent", "verifiers", "nemo_gym"])
def test_every_token_of_a_stack_is_trained_and_nothing_of_it_is_left(place, stack):
    built, commands = commands_of(stack)
    build(built, place)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for command in commands:
        run(command.replace(PORT, str(port)), place)
    folder = place / "results" / stack
    record = folder / ("run/nemo_gym_sessions.jsonl" if stack == "nemo_gym" else "sessions.jsonl")
    told = [json.loads(line) for line in record.read_text().splitlines()]
    by_session = {(one["index"], one["sample"]): one for one in told}
    assert len(by_session) == len(told)  # nothing was played twice
    steps = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    assert len(told) == 2 * 2 * SAMPLES
    found = trained_in(folder / "run")
    assert found.keys() == by_session.keys()
    for key, one in by_session.items():
        trained = found[key]
        assert trained.calls == one["calls"] == one["recorded_calls"]
        assert (trained.tokens, trained.reward) == (one["tokens"], pytest.approx(one["reward"]))
    assert len({one["reward"] for one in told}) > 1  # else one that is always given would do
    if stack != "verifiers":  # whose task has no tool
        assert sum(one["tool_calls"] for one in told) > 0
    socket.create_server(("127.0.0.1", port)).close()  # nobody listens there any more
