"""The group against real Ray actors, torch.distributed gloo where the ranks must meet."""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray
from refusals import assert_refused, refused

from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.failures import WorkerError
from nemo_rl_mcore.driver.actors.gang import RayWorkerGroup
from nemo_rl_mcore.rank import activity

pytestmark = pytest.mark.stage("processes")

# pytest's module names mean nothing to a worker.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

START_S = 30
"""Longer than a process takes to start on a busy machine: what counts is what its constructor does then."""


class Rank:
    def __init__(
        self, greeting: str = "", *, fail_on: int = -1, hang_on: int = -1, work_s: float = 0
    ) -> None:
        self.rank = int(os.environ["RANK"])
        self.greeting = greeting
        self.token = os.environ.get("HF_TOKEN")
        if work_s:
            self.work(int(work_s / 0.3), 0.3)
        if self.rank == fail_on:
            raise ValueError("this rank refuses its config")
        if self.rank == hang_on:
            time.sleep(600)

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def combine(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return self.rank, args, kwargs

    def count(self) -> int:
        self.counted = vars(self).get("counted", 0) + 1
        return self.counted

    def fail(self, on: list[int]) -> int:
        if self.rank in on:
            raise KeyError(f"rank {self.rank} has no such row")
        return self.rank

    def hang(self, on: list[int]) -> int:
        if self.rank in on:
            time.sleep(600)
        return self.rank

    def work(self, pieces: int, pause_s: float) -> int:
        for piece in range(pieces):
            activity.advance(f"piece {piece}")
            time.sleep(pause_s)
        return self.rank

    def token_at_construction(self) -> str | None:
        return self.token

    def crash(self, on: int) -> None:
        if self.rank == on:
            sys.stderr.write("fatal: off\n")
            sys.stderr.flush()
            os._exit(3)


class GlooRank(Rank):
    def __init__(self) -> None:
        super().__init__()
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if self.rank == 0:
            os.close(int(os.environ["MASTER_LISTEN_FD"]))  # torch binds the port itself here
        dist.init_process_group("gloo")

    def all_reduce(self, action: str = "", on: int = -1) -> float:
        import torch
        import torch.distributed as dist

        if self.rank == on:
            if action == "raise":
                raise RuntimeError("NaN in the loss")
            os.kill(os.getpid(), signal.SIGKILL)
        value = torch.tensor(float(self.rank + 1))
        dist.all_reduce(value)
        return value.item()


@pytest.fixture
def make_group(cluster: RayCluster) -> Any:
    groups: list[RayWorkerGroup] = []

    def make(worker_class: type, *args: Any, **kwargs: Any) -> RayWorkerGroup:
        groups.append(
            RayWorkerGroup(worker_class, cluster, args, kwargs, start_timeout_s=60, call_timeout_s=60)
        )
        return groups[-1]

    yield make
    for group in groups:
        group.shutdown()


@pytest.fixture(scope="module")
def steady(cluster: RayCluster) -> Any:
    """A group for the tests that leave it whole."""
    with RayWorkerGroup(Rank, cluster, ("hello",)) as group:
        yield group


def running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def becomes_true(condition: Callable[[], bool], within_s: float = 20) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def timed_error(call: Callable[[], Any]) -> tuple[WorkerError, float]:
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        call()
    return caught.value, time.monotonic() - started


def test_every_rank_knows_its_place(steady: RayWorkerGroup) -> None:
    environments = steady.run_all("environment")
    assert [e["RANK"] for e in environments] == [e["LOCAL_RANK"] for e in environments] == ["0", "1"]
    assert {e["WORLD_SIZE"] for e in environments} == {"2"}
    assert {e["MASTER_ADDR"] for e in environments} == {"127.0.0.1"}
    assert len({e["MASTER_PORT"] for e in environments}) == 1
    assert {e["OMP_NUM_THREADS"] for e in environments} == {"1"}
    assert {e["CUDA_VISIBLE_DEVICES"] for e in environments} == {""}


def test_ranks_see_only_the_allowed_variables(make_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATE_SECRET", "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    for environment in make_group(Rank).run_all("environment"):
        assert "hunter2" not in environment.values()
        assert not {"WORKERS_TEST_TOKEN", "AWS_SECRET_ACCESS_KEY", "LATE_SECRET"} & set(environment)
        assert environment["NCCL_DEBUG"] == "WARN"
        assert environment["PATH"] == os.environ["PATH"]
        assert "PYTHONDONTWRITEBYTECODE" not in environment


def test_run_all_sends_the_same_to_all_and_answers_in_order(steady: RayWorkerGroup) -> None:
    assert steady.run_all("combine", 1, [2], name="x") == [
        (0, (1, [2]), {"name": "x"}),
        (1, (1, [2]), {"name": "x"}),
    ]


def test_every_rank_is_sent_its_own_arguments_and_what_is_common_to_all(steady: RayWorkerGroup) -> None:
    assert steady.run_all("combine", 5, per_rank_kwargs=[{"data": "a"}, {"data": "b"}], common=7) == [
        (0, (5,), {"common": 7, "data": "a"}),
        (1, (5,), {"common": 7, "data": "b"}),
    ]


def test_the_ranks_with_arguments_of_their_own_are_counted(steady: RayWorkerGroup) -> None:
    with refused("entries-per-rank", "combine", "per_rank_kwargs", 1, 2):
        steady.run_all("combine", per_rank_kwargs=[{}])


def test_a_rank_whose_answer_nobody_wants_runs_the_method_and_ships_nothing(steady: RayWorkerGroup) -> None:
    before = steady.run_all("count")
    assert steady.run_all("count", answering=[1]) == [None, before[1] + 1]
    assert steady.run_all("count", answering=[]) == [None, None]
    assert steady.run_all("count") == [count + 3 for count in before]
    error, _ = timed_error(lambda: steady.run_all("fail", on=[0], answering=[]))
    assert (error.rank, error.usable) == (0, True)


def test_when_every_rank_raises_the_group_stays_usable(steady: RayWorkerGroup) -> None:
    error, seconds = timed_error(lambda: steady.run_all("fail", on=[0, 1], context="step 12"))
    assert seconds < 30
    assert isinstance(error.cause, KeyError)
    assert f"host {steady.identities[error.rank].host}" in str(error)
    assert (error.method, error.context) == ("fail", "step 12")
    assert f"rank {1 - error.rank}: KeyError" in str(error)
    assert steady.run_all("fail", on=[]) == [0, 1]


def test_one_rank_raises_while_its_peer_waits_in_a_collective(make_group: Any) -> None:
    group = make_group(GlooRank)
    assert group.run_all("all_reduce") == [3.0, 3.0]
    error, seconds = timed_error(lambda: group.run_all("all_reduce", "raise", on=1, context="step 3"))
    assert 4.5 < seconds < 30
    assert (error.rank, error.host, error.method, error.context) == (1, "127.0.0.1", "all_reduce", "step 3")
    text = str(error)
    first_line = text.splitlines()[0]
    assert first_line.startswith("rank 1 (host 127.0.0.1, pid ")
    assert first_line.endswith(f"RuntimeError: {error.cause}")
    assert "rank 0: " in text
    assert "in all_reduce\n" in text
    assert "\x1b" not in text
    assert becomes_true(lambda: not running(group.identities[0].pid))
    again, seconds = timed_error(lambda: group.run_all("all_reduce", context="step 4"))
    assert seconds < 4
    assert_refused(again, "ended-before", "all_reduce (step 4)", error.cause)


@pytest.mark.smoke
def test_a_killed_rank_is_the_root_cause(make_group: Any) -> None:
    group = make_group(GlooRank)
    error, seconds = timed_error(lambda: group.run_all("all_reduce", "kill", on=0, context="step 5"))
    assert seconds < 45
    assert error.rank == 0
    first_line, *rest = str(error).splitlines()
    assert first_line.startswith(f"rank 0 ({group.identities[0]}) died in all_reduce (step 5): ")
    assert any(line.strip().startswith("rank 1:") for line in rest)


def test_the_end_of_standard_error_is_shown_for_a_crash(make_group: Any) -> None:
    group = make_group(Rank)
    error, _ = timed_error(lambda: group.run_all("crash", on=1))
    assert error.rank == 1
    assert str(error).splitlines()[-1] == "fatal: off"


def test_a_deadline_names_what_it_waited_for(make_group: Any) -> None:
    group = make_group(Rank)
    error, seconds = timed_error(lambda: group.run_all("hang", on=[1], context="step 7", timeout_s=1.5))
    assert 1.4 < seconds < 30
    assert error.rank == -1
    rank = f"rank 1 ({group.identities[1]})"
    assert_refused(error, "no-progress", "hang (step 7) ", "1.5 s", rank, "'starting'", "1 of 2")
    rest = str(error).splitlines()[1:]
    assert rest[0].startswith("--- rank 1, ")
    assert rest[-1].strip() == "time.sleep(600)"
    assert becomes_true(lambda: not running(group.identities[1].pid))


def test_a_call_may_take_longer_than_its_deadline_while_it_makes_progress(steady: RayWorkerGroup) -> None:
    assert steady.run_all("work", pieces=12, pause_s=0.3, timeout_s=1.5) == [0, 1]


def test_a_stopped_rank_is_named_and_ended(make_group: Any) -> None:
    group = make_group(Rank)
    pid = group.identities[1].pid
    os.kill(pid, signal.SIGSTOP)
    error, seconds = timed_error(lambda: group.run_all("combine", timeout_s=2, context="step 8"))
    assert seconds < 30
    rank = f"rank 1 ({group.identities[1]})"
    assert_refused(error, "no-progress", "combine (step 8) ", rank, "process is stopped", "1 of 2")
    assert becomes_true(lambda: not running(pid))


def test_a_secret_is_there_for_the_constructor_and_nowhere_else(cluster: RayCluster) -> None:
    with RayWorkerGroup(Rank, cluster, secrets={"HF_TOKEN": "hf_hunter2"}) as group:
        assert group.run_all("token_at_construction") == ["hf_hunter2"] * 2
        assert all("HF_TOKEN" not in environment for environment in group.run_all("environment"))
    assert cluster.log_dir is not None
    for log in cluster.log_dir.rglob("*"):
        assert not log.is_file() or b"hf_hunter2" not in log.read_bytes(), log


def test_a_constructor_that_fails_names_its_rank(cluster: RayCluster) -> None:
    error, seconds = timed_error(lambda: RayWorkerGroup(Rank, cluster, (), {"fail_on": 1}))
    assert seconds < START_S
    assert error.rank == 1
    assert error.host == "127.0.0.1"
    assert isinstance(error.cause, ValueError)
    assert error.method == "Rank()"


def test_a_second_group_has_its_own_rendezvous_and_its_own_end(
    steady: RayWorkerGroup, make_group: Any
) -> None:
    group = make_group(Rank)
    assert len({each.run_all("environment")[0]["MASTER_PORT"] for each in (steady, group)}) == 2
    pids = [identity.pid for identity in group.identities.values()]
    assert all(running(pid) for pid in pids)
    group.shutdown()
    group.shutdown()
    assert becomes_true(lambda: not any(running(pid) for pid in pids))
    with refused("shut-down", by=WorkerError):
        group.run_all("combine")
    assert len(steady.run_all("combine")) == 2
