"""Drivers that join a cluster which asks for a token: with it, with another one, without one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from raylets import Raylets

pytestmark = pytest.mark.stage("processes")

JOINS = """
from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.driver.actors.cluster import RayCluster
try:
    with RayCluster(ClusterConfig(cpu_workers_per_node=1)):
        print("joined")
except RunStoppedError as error:
    print(error)
"""
ASKS = """
from nemo_rl_mcore.driver.actors.cluster import TokenRefusedError, authenticate
try:
    authenticate("127.0.0.1:1", has_port=True)
except TokenRefusedError as error:
    print("refused", error)
"""


def driver(code: str, home: Path, **environment: str) -> tuple[int, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # A driver that asks again and again does so for minutes.
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **environment, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return run.returncode, run.stdout


def with_token(home: Path, token: str) -> Path:
    (home / ".ray").mkdir(parents=True)
    (home / ".ray/auth_token").write_text(token)
    return home


def test_a_token_that_is_to_be_sent_and_is_not_there_is_an_error_and_no_abort(tmp_path: Path) -> None:
    code, output = driver(ASKS, tmp_path, RAY_AUTH_MODE="token")
    assert code == 0
    assert output.startswith("refused ")


@pytest.fixture(scope="module")
def head() -> Iterator[dict[str, str]]:
    with Raylets() as cluster:
        yield cluster.environment


@pytest.mark.exhaustive
def test_the_users_token_is_sent_where_it_is_asked_for(head: dict[str, str], tmp_path: Path) -> None:
    home = with_token(tmp_path, head["RAY_AUTH_TOKEN"])
    assert driver(JOINS, home, RAY_ADDRESS=head["RAY_ADDRESS"]) == (0, "joined\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["none", "another", "none, but the mode", "another, and the mode"])
def test_a_wrong_token_or_none_is_final_at_the_first_answer(
    head: dict[str, str], tmp_path: Path, case: str
) -> None:
    home = with_token(tmp_path, "f" * 64) if case.startswith("another") else tmp_path
    mode = {"RAY_AUTH_MODE": "token"} if case.endswith("mode") else {}
    code, output = driver(JOINS, home, RAY_ADDRESS=head["RAY_ADDRESS"], **mode)
    assert code == 0
    assert f"RAY_ADDRESS={head['RAY_ADDRESS']} " in output
    assert "RAY_AUTH_TOKEN" in output
