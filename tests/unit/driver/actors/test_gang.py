"""The group against real Ray actors, torch.distributed gloo where the ranks must meet; calls that need not block."""

import os
import signal
import sys
import threading
import time

import pytest
import ray
from processes import left_after
from refusals import assert_refused, refused

from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.failures import WorkerCall, WorkerError
from nemo_rl_mcore.driver.actors.gang import GroupInUseError, PendingCall, RayWorkerGroup
from nemo_rl_mcore.driver.signals import stop_signals
from nemo_rl_mcore.rank import activity

pytestmark = pytest.mark.stage("processes")

# pytest's module names mean nothing to a worker.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

START_S = 30
"""Longer than a process takes to start on a busy machine: what counts is what its constructor does then."""


class Rank:
    def __init__(self, fail_on=-1):
        self.rank = int(os.environ["RANK"])
        self.token = os.environ.get("HF_TOKEN")
        if self.rank == fail_on:
            raise ValueError("this rank refuses its config")

    def environment(self):
        return dict(os.environ)

    def combine(self, *args, **kwargs):
        return self.rank, args, kwargs

    def count(self):
        self.counted = vars(self).get("counted", 0) + 1
        return self.counted

    def pause(self, seconds):
        time.sleep(seconds)
        return self.rank

    def fail(self, on, hang=-1):
        self.hang([hang])
        if self.rank in on:
            raise KeyError(f"rank {self.rank} has no such row")
        return self.rank

    def hang(self, on):
        if self.rank in on:
            time.sleep(600)
        return self.rank

    def work(self, pieces, pause_s):
        for piece in range(pieces):
            activity.advance(f"piece {piece}")
            time.sleep(pause_s)
        return self.rank

    def token_at_construction(self):
        return self.token

    def crash(self, on):
        if self.rank == on:
            sys.stderr.write("fatal: off\n")
            sys.stderr.flush()
            os._exit(3)


class GlooRank(Rank):
    def __init__(self):
        super().__init__()
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if self.rank == 0:
            os.close(int(os.environ["MASTER_LISTEN_FD"]))  # torch binds the port itself here
        dist.init_process_group("gloo")

    def all_reduce(self, killed=-1):
        import torch
        import torch.distributed as dist

        if self.rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        value = torch.tensor(float(self.rank + 1))
        dist.all_reduce(value)
        return value.item()


@pytest.fixture
def make_group(cluster):
    groups: list[RayWorkerGroup] = []

    def make(worker_class, *args, **kwargs):
        groups.append(
            RayWorkerGroup(worker_class, cluster, args, kwargs, start_timeout_s=60, call_timeout_s=60)
        )
        return groups[-1]

    yield make
    for group in groups:
        group.shutdown()


@pytest.fixture(scope="module")
def steady(cluster):
    """A group for the tests that leave it whole."""
    with RayWorkerGroup(Rank, cluster) as group:
        yield group


def timed_error(call):
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        call()
    return caught.value, time.monotonic() - started


def test_every_rank_knows_its_place(steady):
    environments = steady.run_all("environment")
    assert [e["RANK"] for e in environments] == [e["LOCAL_RANK"] for e in environments] == ["0", "1"]
    assert {e["WORLD_SIZE"] for e in environments} == {"2"}
    assert {e["MASTER_ADDR"] for e in environments} == {"127.0.0.1"}
    assert len({e["MASTER_PORT"] for e in environments}) == 1
    assert {e["OMP_NUM_THREADS"] for e in environments} == {"1"}
    assert {e["CUDA_VISIBLE_DEVICES"] for e in environments} == {""}


def test_ranks_see_only_the_allowed_variables(make_group, monkeypatch):
    monkeypatch.setenv("LATE_SECRET", "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    for environment in make_group(Rank).run_all("environment"):
        assert "hunter2" not in environment.values()
        assert not {"WORKERS_TEST_TOKEN", "AWS_SECRET_ACCESS_KEY", "LATE_SECRET"} & set(environment)
        assert environment["NCCL_DEBUG"] == "WARN"
        assert environment["PATH"] == os.environ["PATH"]
        assert "PYTHONDONTWRITEBYTECODE" not in environment


def test_every_rank_is_sent_what_is_common_to_all_and_its_own(steady):
    assert steady.run_all("combine", 1, [2], name="x") == [(rank, (1, [2]), {"name": "x"}) for rank in (0, 1)]
    assert steady.run_all("combine", 5, per_rank_kwargs=[{"data": "a"}, {"data": "b"}], common=7) == [
        (0, (5,), {"common": 7, "data": "a"}),
        (1, (5,), {"common": 7, "data": "b"}),
    ]
    with refused("entries-per-rank", "combine", "per_rank_kwargs", 1, 2):
        steady.run_all("combine", per_rank_kwargs=[{}])


def test_a_rank_whose_answer_nobody_wants_runs_the_method_and_ships_nothing(steady):
    before = steady.run_all("count")
    assert steady.run_all("count", answering=[1]) == [None, before[1] + 1]
    assert steady.run_all("count", answering=[]) == [None, None]
    assert steady.run_all("count") == [count + 3 for count in before]
    error, _ = timed_error(lambda: steady.run_all("fail", on=[0], answering=[]))
    assert (error.rank, error.usable) == (0, True)


def test_when_every_rank_raises_the_group_stays_usable(steady):
    error, seconds = timed_error(lambda: steady.run_all("fail", on=[0, 1], context="step 12"))
    assert seconds < 30
    assert isinstance(error.cause, KeyError)
    assert f"host {steady.identities[error.rank].host}" in str(error)
    assert (error.method, error.context) == ("fail", "step 12")
    assert f"rank {1 - error.rank}: KeyError" in str(error)
    assert steady.run_all("fail", on=[]) == [0, 1]


@pytest.mark.smoke
def test_a_killed_rank_is_the_root_cause(make_group):
    group = make_group(GlooRank)
    assert group.run_all("all_reduce") == [3.0, 3.0]
    error, seconds = timed_error(lambda: group.run_all("all_reduce", killed=0, context="step 5"))
    assert seconds < 45
    assert error.rank == 0
    first_line, *rest = str(error).splitlines()
    assert first_line.startswith(f"rank 0 ({group.identities[0]}) died in all_reduce (step 5): ")
    assert any(line.strip().startswith("rank 1:") for line in rest)


def test_the_end_of_standard_error_is_shown_for_a_crash(make_group):
    group = make_group(Rank)
    error, _ = timed_error(lambda: group.run_all("crash", on=1))
    assert error.rank == 1
    assert str(error).splitlines()[-1] == "fatal: off"


def test_a_deadline_names_what_it_waited_for(make_group):
    group = make_group(Rank)
    error, seconds = timed_error(lambda: group.run_all("hang", on=[1], context="step 7", timeout_s=1.5))
    assert 1.4 < seconds < 30
    assert error.rank == -1
    rank = f"rank 1 ({group.identities[1]})"
    assert_refused(error, "no-progress", "hang (step 7) ", "1.5 s", rank, "'starting'", "1 of 2")
    rest = str(error).splitlines()[1:]
    assert rest[0].startswith("--- rank 1, ")
    assert rest[-1].strip() == "time.sleep(600)"
    assert not left_after(20, [group.identities[1].pid])


def test_a_call_may_take_longer_than_its_deadline_while_it_makes_progress(steady):
    assert steady.run_all("work", pieces=12, pause_s=0.3, timeout_s=1.5) == [0, 1]


def test_a_secret_is_there_for_the_constructor_and_nowhere_else(cluster):
    with RayWorkerGroup(Rank, cluster, secrets={"HF_TOKEN": "hf_hunter2"}) as group:
        assert group.run_all("token_at_construction") == ["hf_hunter2"] * 2
        assert all("HF_TOKEN" not in environment for environment in group.run_all("environment"))
    assert cluster.log_dir is not None
    for log in cluster.log_dir.rglob("*"):
        assert not log.is_file() or b"hf_hunter2" not in log.read_bytes(), log


def test_a_constructor_that_fails_names_its_rank(cluster):
    error, seconds = timed_error(lambda: RayWorkerGroup(Rank, cluster, (), {"fail_on": 1}))
    assert seconds < START_S
    assert error.rank == 1
    assert error.host == "127.0.0.1"
    assert isinstance(error.cause, ValueError)
    assert error.method == "Rank()"


def test_a_second_group_has_its_own_rendezvous_and_its_own_end(steady, make_group):
    group = make_group(Rank)
    assert len({each.run_all("environment")[0]["MASTER_PORT"] for each in (steady, group)}) == 2
    pids = [identity.pid for identity in group.identities.values()]
    group.shutdown()
    group.shutdown()
    assert not left_after(20, pids)
    with refused("shut-down", by=WorkerError):
        group.run_all("combine")
    assert len(steady.run_all("combine")) == 2


# Calls that need not block


@pytest.fixture(scope="module")
def policy(cluster):
    with RayWorkerGroup(Rank, cluster, name="policy") as group:
        yield group


@pytest.fixture(scope="module")
def teacher(cluster):
    with RayWorkerGroup(Rank, cluster, name="teacher") as group:
        yield group


def polled(done, every_s=0.05, within_s=30):
    """Ask until it is done, never held up by the asking; returns the seconds."""
    began = time.monotonic()
    while True:
        asked = time.monotonic()
        answer = done()
        assert time.monotonic() - asked < 4.0, "asking must not wait for a rank"
        if answer:
            return time.monotonic() - began
        assert time.monotonic() - began < within_s
        time.sleep(every_s)


def test_one_thread_waits_for_calls_to_several_groups(policy, teacher):
    began = time.monotonic()
    calls = {"slow": policy.call("pause", 2.0), "quick": teacher.call("pause", 0.2)}
    order: list[str] = []

    def all_done():
        order.extend(name for name, call in calls.items() if name not in order and call.look())
        return len(order) == 2

    polled(all_done)
    assert order == ["quick", "slow"]
    assert [call.result() for call in calls.values()] == [[0, 1], [0, 1]]
    assert time.monotonic() - began < 4, "they ran at the same time"


def test_a_pending_call_tells_what_each_rank_said_last(policy):
    call = policy.call("work", pieces=8, pause_s=0.3, timeout_s=4)
    assert (call.timeout_s, call.watch.progress) == (4, {})
    polled(lambda: call.look() or len(call.watch.progress) == 2)
    said = {rank: told.doing for rank, told in call.watch.progress.items()}
    assert set(said) == {0, 1}
    assert all(doing.startswith("piece ") for doing in said.values())
    call.result()
    assert call.watch.progress[0].count >= 1


def test_deadlines_do_not_pass_while_nobody_asks(policy):
    call = policy.call("pause", 3.5, timeout_s=2)
    assert not call.look()
    time.sleep(2.5)
    assert not call.look(), "2.5 s have passed in which nobody could hear of progress"
    assert call.result() == [0, 1]


def test_a_second_call_while_one_is_pending_is_refused_by_both_names(policy):
    call = policy.call("pause", 0.5, context="call 1")
    with pytest.raises(GroupInUseError, match=r"^fail \(call 2\) .* policy is at pause \(call 1\)"):
        policy.run_all("fail", on=[0], context="call 2")
    polled(call.look)
    with pytest.raises(GroupInUseError, match="pause"):
        policy.call("pause", 0)
    assert call.result() == [0, 1]
    assert policy.run_all("pause", 0) == [0, 1]


def test_a_failure_says_which_group_and_that_it_can_be_called_again(policy, teacher):
    failing, well = policy.call("fail", on=[1]), teacher.call("pause", 0.1)
    polled(failing.look)
    with pytest.raises(WorkerError, match=r"^policy rank 1 \(") as caught:
        failing.result()
    failure = caught.value
    assert (failure.group, failure.rank, failure.method, failure.usable) == ("policy", 1, "fail", True)
    assert isinstance(failure.cause, KeyError)
    with pytest.raises(WorkerError) as again:
        failing.result()
    assert again.value is caught.value
    assert well.result() == policy.run_all("pause", 0) == [0, 1]


def test_polling_never_waits_for_the_grace_of_the_other_ranks_and_a_lost_group_says_so(cluster):
    with RayWorkerGroup(Rank, cluster, name="value") as group:
        call = group.call("fail", on=[0], hang=1)
        assert 4.5 < polled(call.look) < 30
        with pytest.raises(WorkerError, match=r"^value rank 0 ") as caught:
            call.result()
        assert (caught.value.group, caught.value.usable) == ("value", False)
        with refused("ended-before", "value rank 0", by=WorkerError) as later:
            group.call("pause", 0)
        assert (later.value.group, later.value.usable) == ("value", False)


def test_a_first_interrupt_waits_for_the_call_a_second_one_ends_the_group(cluster):
    def interrupt_after(*delays):
        for delay in delays:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()

    with RayWorkerGroup(Rank, cluster, name="policy") as group, stop_signals():
        began = time.monotonic()
        call = group.call("pause", 2.0)
        interrupt_after(0.5)
        with pytest.raises(KeyboardInterrupt):
            call.result()
        assert time.monotonic() - began > 1.8
        assert call.result() == [0, 1]
    with RayWorkerGroup(Rank, cluster, name="policy") as group, stop_signals():
        call = group.call("pause", 60.0)
        interrupt_after(0.5, 1.5)
        with pytest.raises(KeyboardInterrupt):
            call.result()
        with refused("interrupted", "pause", by=WorkerError):
            call.result()
        with refused("ended-before", "pause", by=WorkerError):
            group.call("pause", 0)


def test_a_group_that_is_shut_down_ends_the_wait_of_another_thread(cluster, monkeypatch):
    killed = RayCluster.kill

    def kill_slowly(*args):
        killed(*args)
        time.sleep(3)  # the thread that waits hears of it before all are killed

    monkeypatch.setattr(RayCluster, "kill", kill_slowly)
    with RayWorkerGroup(Rank, cluster, name="policy") as group:
        call = group.call("pause", 60.0)
        threading.Timer(1.0, group.shutdown).start()
        began = time.monotonic()
        with refused("rank-died", "pause", by=WorkerError):
            call.result()
        assert time.monotonic() - began < 10
        with refused("shut-down", by=WorkerError):
            group.call("pause", 0)


@pytest.mark.usefixtures("cluster")
def test_answers_that_are_there_are_taken_in_two_looks_however_many_they_are(monkeypatch):
    looks, wait = list[int](), ray.wait

    def counted(refs, **options):
        looks.append(len(refs))
        return wait(refs, **options)

    monkeypatch.setattr(ray, "wait", counted)
    refs = {ray.put(10 * rank): rank for rank in range(20)}
    call = PendingCall(WorkerCall("pause", timeout_s=60), (), refs)
    assert call.look()
    assert call.result() == [10 * rank for rank in range(20)]
    assert looks == [20, 19]
