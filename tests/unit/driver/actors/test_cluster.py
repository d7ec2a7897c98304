"""The session's life and death, seen from outside: which of its processes run, and where they listen."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import ray
from processes import ProcessWatch, within
from raylets import Raylets
from refusals import refused

from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.driver.actors.cluster import RayCluster, Reaper, kill, processes_of, state_of
from nemo_rl_mcore.driver.actors.failures import RankIdentity
from nemo_rl_mcore.errors import RunStoppedError

pytestmark = pytest.mark.stage("processes")

DRIVER = """
import os, sys, time
from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.failures import RankIdentity
from nemo_rl_mcore.driver.actors.failures import WorkerError
from nemo_rl_mcore.driver.actors.gang import RayWorkerGroup

class Rank:
    def rank(self):
        return os.environ["RANK"]
    def hang(self):
        time.sleep(600)

print("starting", flush=True)
with RayCluster(ClusterConfig(cpu_workers_per_node=2)) as cluster:
    with RayWorkerGroup(Rank, cluster) as group:
        print("ready", flush=True)
        {body}
print("left", flush=True)
"""


class Driver:
    def __init__(self, body, **environment):
        self.watch = ProcessWatch()
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(DRIVER).format(body=body)],
            env={**os.environ, **self.watch.environment, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.watch.follow(self.process.pid)

    def next_line(self):
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def wait_until_ready(self):
        assert [self.next_line(), self.next_line()] == ["starting", "ready"]

    def wait(self, timeout_s=20):
        output, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output, errors

    def clean_up(self):
        self.watch.kill_all()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def start_driver():
    started = []

    def start(body, **environment):
        started.append(Driver(body, **environment))
        return started[-1]

    yield start
    for driver in started:
        driver.clean_up()


def listening_addresses(pids):
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


@pytest.fixture
def short_folder():
    """Ray's sockets have no room for pytest's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_a_session_listens_on_the_loopback_only_has_a_private_folder_and_leaves_nothing(
    start_driver, short_folder
):
    driver = start_driver("sys.stdin.readline()", RAY_TMPDIR=str(short_folder))
    driver.wait_until_ready()
    [folder] = short_folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [*folder.glob("ray/session_*/logs")]
    pids = set(driver.watch.alive())
    assert len(pids) >= 5  # gcs, raylet, agents, two ranks
    addresses = listening_addresses(pids)
    assert addresses
    assert addresses <= {LOOPBACK_V4, LOOPBACK_V4_IN_V6}
    code, output, errors = driver.wait()
    assert (code, output, errors) == (0, "left\n", "")
    assert [*short_folder.iterdir()] == []
    assert driver.watch.all_gone(within_s=5), driver.watch.alive()


def servers(driver, name):
    """The process of Ray with that name."""
    [pid] = [pid for pid, title in driver.watch.alive().items() if Path(title.split()[0]).name == name]
    return pid


@pytest.mark.exhaustive_cases("raylet")
@pytest.mark.parametrize("server", ["raylet", "gcs_server"])
def test_a_dead_server_of_ray_is_named_and_ends_the_run(start_driver, server):
    driver = start_driver("group.run_all('hang')")
    driver.wait_until_ready()
    os.kill(servers(driver, server), signal.SIGKILL)
    code, _, errors = driver.wait(
        timeout_s=40
    )  # told within 2 s; then Ray takes its time to leave a dead session
    assert code == 1
    assert "WorkerError: hang " in errors
    assert f" {server} (pid " in errors
    assert driver.watch.all_gone(within_s=5), driver.watch.alive()


@pytest.mark.exhaustive
def test_signals_to_the_whole_process_group_reach_the_driver_alone(start_driver):
    arm = "signal.signal(number, lambda *_: print('signalled', flush=True))"
    driver = start_driver(
        f"import signal; [{arm} for number in (signal.SIGTERM, signal.SIGHUP)]; print('armed', flush=True); "
        "sys.stdin.readline(); print('all there' if group.run_all('rank') else '', flush=True)"
    )
    driver.wait_until_ready()
    assert driver.next_line() == "armed"
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.killpg(driver.process.pid, number)
        assert driver.next_line() == "signalled"
    code, output, errors = driver.wait()
    assert (code, output, errors) == (0, "all there\nleft\n", "")


@pytest.mark.exhaustive_cases("1.5")
@pytest.mark.parametrize("delay_s", [0.5, 1.5])
def test_ctrl_c_while_ray_starts_leaves_nothing(start_driver, delay_s):
    driver = start_driver("sys.stdin.readline()")
    assert driver.next_line() == "starting"
    time.sleep(delay_s)
    os.killpg(driver.process.pid, signal.SIGINT)
    code, output, errors = driver.wait(timeout_s=30)
    assert code == -signal.SIGINT
    assert errors.strip().splitlines()[-1] == "KeyboardInterrupt"
    assert "left" not in output
    # Processes that Ray forgot end by themselves, but some only after 3 s.
    assert driver.watch.all_gone(within_s=2), driver.watch.alive()


def test_a_session_of_the_process_is_used_and_left_alone(cluster):
    before = ray.get_runtime_context().get_job_id()
    with RayCluster(ClusterConfig(cpu_workers_per_node=1)) as second:
        assert len(second.place_ranks().slots) == 1
    assert ray.is_initialized()
    assert ray.get_runtime_context().get_job_id() == before


def test_a_session_that_is_shared_protects_the_ranks_of_both(cluster):
    other = cluster.shared_with(ClusterConfig(cpu_workers_per_node=1))
    assert len(other.place_ranks().slots) == 1
    assert other.log_dir == cluster.log_dir is not None
    process = subprocess.Popen(["sleep", "60"])
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        stopped = other.process_state(RankIdentity("here", process.pid, ""))
        assert stopped == cluster.process_state(RankIdentity("here", process.pid, "")) != ""
    finally:
        process.kill()
        process.wait()
    with refused("missing-gpus", "cluster.num_nodes=1", "cluster.gpus_per_node=4", [0]):
        cluster.shared_with(ClusterConfig(gpus_per_node=4))
    assert ray.is_initialized()


@pytest.fixture
def without_session(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return monkeypatch


@pytest.mark.usefixtures("without_session")
def test_two_machines_need_a_cluster_that_runs():
    with refused("no-cluster", "cluster.num_nodes=2", "RAY_ADDRESS"), RayCluster(ClusterConfig(num_nodes=2)):
        pass


@pytest.mark.smoke
def test_a_dead_address_is_found_within_seconds_and_named(without_session):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, so that nobody takes it, but it does not listen
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        without_session.setenv("RAY_ADDRESS", address)
        start = time.monotonic()
        with refused("no-cluster", f"RAY_ADDRESS={address}", "refused"):
            RayCluster(ClusterConfig(cpu_workers_per_node=1)).__enter__()
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("address", ["auto", "not an address", "127.0.0.1:99999", "no host.invalid:6379"])
def test_an_address_without_a_cluster_is_named(without_session, tmp_path, address):
    without_session.setenv("RAY_ADDRESS", address)
    without_session.setenv("RAY_TMPDIR", str(tmp_path))

    def refuse(address, **_options):
        raise ConnectionError(f"Could not find any running Ray instance at {address}")

    if address == "auto":
        without_session.setattr(ray, "init", refuse)
    with refused("no-cluster", f"RAY_ADDRESS={address} "):
        RayCluster(ClusterConfig(cpu_workers_per_node=1)).__enter__()


def test_a_local_session_that_does_not_start_says_what_to_do(without_session):
    def fail(**_options):
        raise Exception("timed out")

    without_session.setattr(ray, "init", fail)
    before = dict(os.environ)
    with refused("session-start", "timed out", "RAY_ADDRESS", by=RunStoppedError):
        RayCluster(ClusterConfig(cpu_workers_per_node=1)).__enter__()
    assert dict(os.environ) == before


# Which processes are a session's, and what becomes of them when its driver is killed; without Ray


WRITER = "import sys, time; file = open(sys.argv[1], sys.argv[2]); print('open', flush=True); time.sleep(600)"


@pytest.fixture
def start():
    started: list[subprocess.Popen[str]] = []

    def start(file, mode):
        file.touch()
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(file), mode], stdout=subprocess.PIPE, text=True
            )
        )
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "open\n"
        return started[-1]

    yield start  # type: ignore[misc]
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_sessions_processes_write_into_its_folder_and_readers_are_not_its_own(start, tmp_path):
    folder = tmp_path / "session"
    folder.mkdir()
    writer = start(folder / "log", "a")
    start(folder / "log", "r")
    start(tmp_path / "session_of_another", "a")
    assert [process.pid for _, process in processes_of(folder)] == [writer.pid]


def test_a_stopped_process_is_known_as_such_and_can_be_killed(start, tmp_path):
    writer = start(tmp_path / "log", "a")
    psutil.Process(writer.pid).suspend()
    assert within(5, lambda: state_of(writer.pid) == "stopped")
    assert kill([psutil.Process(writer.pid)]) == []
    assert state_of(writer.pid) == "gone"


def test_the_reaper_ends_a_session_whose_driver_was_killed_and_no_other(start, tmp_path):
    folder = tmp_path / "session"
    folder.mkdir()
    writer, reader = start(folder / "log", "a"), start(folder / "log", "r")
    driver = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys, time; "
            "from nemo_rl_mcore.driver.actors.cluster import Reaper; "
            "reaper = Reaper('writers', sys.argv[1]); print('ready', flush=True); time.sleep(600)",
            str(folder),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "ready\n"
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert writer.wait(timeout=10) == -9
    time.sleep(0.6)  # another round
    assert reader.poll() is None


def test_a_reaper_that_is_dismissed_kills_nobody(start, tmp_path):
    writer = start(tmp_path / "log", "a")
    Reaper("writers", str(tmp_path)).dismiss()
    assert writer.poll() is None


# A cluster that asks for a token: drivers with it, with another one, without one


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


def driver(code, home, **environment):
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


def with_token(home, token):
    (home / ".ray").mkdir(parents=True)
    (home / ".ray/auth_token").write_text(token)
    return home


def test_a_token_that_is_to_be_sent_and_is_not_there_is_an_error_and_no_abort(tmp_path):
    code, output = driver(ASKS, tmp_path, RAY_AUTH_MODE="token")
    assert code == 0
    assert output.startswith("refused ")


@pytest.fixture(scope="module")
def head():
    with Raylets() as cluster:
        yield cluster.environment


@pytest.mark.exhaustive
def test_the_users_token_is_sent_where_it_is_asked_for(head, tmp_path):
    home = with_token(tmp_path, head["RAY_AUTH_TOKEN"])
    assert driver(JOINS, home, RAY_ADDRESS=head["RAY_ADDRESS"]) == (0, "joined\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["none", "another", "none, but the mode", "another, and the mode"])
def test_a_wrong_token_or_none_is_final_at_the_first_answer(head, tmp_path, case):
    home = with_token(tmp_path, "f" * 64) if case.startswith("another") else tmp_path
    mode = {"RAY_AUTH_MODE": "token"} if case.endswith("mode") else {}
    code, output = driver(JOINS, home, RAY_ADDRESS=head["RAY_ADDRESS"], **mode)
    assert code == 0
    assert f"RAY_ADDRESS={head['RAY_ADDRESS']} " in output
    assert "RAY_AUTH_TOKEN" in output
