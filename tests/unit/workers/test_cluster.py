"""The session's life and death, seen from outside: each process of it carries a marker in its environment."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.workers.cluster import RayCluster

# An allowed variable, so that Ray hands it to all its processes.
MARKER_NAME = "MEGATRON_TEST_MARKER"

DRIVER = """
import os, sys, time
from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.workers.cluster import RayCluster
from nemo_rl_mcore.workers.worker_group import RayWorkerGroup, WorkerError

class Rank:
    def hang(self):
        time.sleep(600)

with RayCluster(ClusterConfig(cpu_workers_per_node=2)) as cluster:
    with RayWorkerGroup(Rank, cluster) as group:
        print("ready", flush=True)
        {body}
print("left", flush=True)
"""


class Driver:
    def __init__(self, body: str, **environment: str) -> None:
        self.marker = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(DRIVER).format(body=body)],
            env={**os.environ, MARKER_NAME: self.marker, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline().strip()

    def session_pids(self) -> set[int]:
        needle = f"{MARKER_NAME}={self.marker}".encode()
        pids = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
        return {pid for pid in pids if needle in read(f"/proc/{pid}/environ").split(b"\0")}

    def wait(self, timeout_s: float = 20) -> tuple[int, str, str]:
        output, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output, errors

    def all_gone(self, within_s: float = 5) -> bool:
        deadline = time.monotonic() + within_s
        while self.session_pids():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def clean_up(self) -> None:
        for pid in self.session_pids():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


@pytest.fixture
def start_driver() -> Iterator[type[Driver]]:
    started: list[Driver] = []

    class Tracked(Driver):
        def __init__(self, body: str, **environment: str) -> None:
            super().__init__(body, **environment)
            started.append(self)

    yield Tracked
    for driver in started:
        driver.clean_up()


def listening_addresses(pids: set[int]) -> set[str]:
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(link))
            except FileNotFoundError:
                continue
    tables = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()
    ]
    listening = [row for row in tables if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return {row[1].rpartition(":")[0] for row in listening}


LOOPBACK_V4, LOOPBACK_V4_IN_V6 = "0100007F", "0000000000000000FFFF00000100007F"


def test_a_session_listens_on_the_loopback_only_and_leaves_nothing(start_driver: type[Driver]) -> None:
    driver = start_driver("sys.stdin.readline()")
    assert driver.first_line == "ready"
    pids = driver.session_pids()
    assert len(pids) >= 5  # gcs, raylet, agents, two ranks
    addresses = listening_addresses(pids)
    assert addresses
    assert addresses <= {LOOPBACK_V4, LOOPBACK_V4_IN_V6}
    code, output, errors = driver.wait()
    assert (code, output, errors) == (0, "left\n", "")
    assert driver.all_gone()


def test_ctrl_c_stops_the_session_cleanly(start_driver: type[Driver]) -> None:
    driver = start_driver("group.run_all('hang')")
    time.sleep(0.5)
    os.killpg(driver.process.pid, signal.SIGINT)  # a terminal sends it to the whole foreground group
    code, _, errors = driver.wait(timeout_s=15)
    assert code == -signal.SIGINT
    assert errors.strip().splitlines()[-1] == "KeyboardInterrupt"
    assert errors.count("Traceback") == 1
    assert driver.all_gone()


def test_a_killed_driver_takes_its_session_along(start_driver: type[Driver]) -> None:
    driver = start_driver("group.run_all('hang')")
    assert len(driver.session_pids()) >= 5
    driver.process.kill()
    assert driver.all_gone(within_s=15)


def test_a_session_of_the_process_is_used_and_left_alone(cluster: RayCluster) -> None:
    before = ray.get_runtime_context().get_job_id()
    with RayCluster(ClusterConfig(cpu_workers_per_node=1)) as second:
        assert len(second.place_ranks().slots) == 1
    assert ray.is_initialized()
    assert ray.get_runtime_context().get_job_id() == before


@pytest.mark.usefixtures("cluster")
def test_missing_gpus_name_the_keys() -> None:
    with (
        pytest.raises(
            RunStoppedError,
            match=r"cluster\.num_nodes=1 with cluster\.gpus_per_node=4 does not fit: .* \[0\] GPUs",
        ),
        RayCluster(ClusterConfig(gpus_per_node=4)),
    ):
        pass
    assert ray.is_initialized()


def test_two_machines_need_a_cluster_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(RunStoppedError, match=r"cluster\.num_nodes=2 needs a Ray cluster .* RAY_ADDRESS"),
        RayCluster(ClusterConfig(num_nodes=2)),
    ):
        pass
