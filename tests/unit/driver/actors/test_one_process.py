"""A rank in this process: it answers, fails and is interrupted as one of Ray's, and Ray is not imported."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.failures import WorkerError
from nemo_rl_mcore.driver.actors.one_process import InProcessRank, OneProcess
from nemo_rl_mcore.driver.policy import open_place
from nemo_rl_mcore.driver.signals import exit_status_of, stop_signals
from nemo_rl_mcore.recipe.load import load_config

pytestmark = pytest.mark.stage("processes")

RECIPE = "examples/configs/grpo_copy_cpu.yaml"
ONE_RANK = ("cluster.cpu_workers_per_node=1", "policy.megatron_cfg.tensor_model_parallel_size=1")


class Worker:
    def __init__(self, number, *, fails=False):
        if fails:
            raise ValueError("no such model")
        self.number, self.left = number, []

    def identity(self):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_LISTEN_FD", "MASTER_PORT")
        return [os.environ.get(name) for name in names], torch.get_num_threads()

    def add(self, value, *, data):
        return self.number + value + data

    def fail(self):
        raise KeyError("x")

    def interrupt(self):
        signal.raise_signal(signal.SIGINT)
        time.sleep(60)

    def shutdown(self):
        self.left.append(True)


@pytest.fixture
def place():
    with OneProcess(ClusterConfig(num_nodes=1, gpus_per_node=0, cpu_workers_per_node=1)) as one:
        yield one


@pytest.fixture
def rank(place):
    group = InProcessRank(Worker, place, (40,), name="policy", deadline_keys="policy", call_timeout_s=600)
    yield group
    group.shutdown()


def test_it_is_the_only_rank_and_the_process_is_afterwards_what_it_was():
    def of_process():
        drawn = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()
        return dict(os.environ), torch.get_num_threads(), sys.excepthook, drawn

    before = of_process()
    with OneProcess(ClusterConfig(num_nodes=1, gpus_per_node=0, cpu_workers_per_node=1)) as one:
        group = InProcessRank(Worker, one, (40,))
        [(environment, own_threads)] = group.run_all("identity")
        os.close(int(environment[4]))
        assert environment[:4] == ["0", "1", "0", "127.0.0.1"]
        assert environment[5].isdecimal()
        assert own_threads == 1
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(7)
        sys.excepthook = print  # as torch has it name the rank
    assert of_process() == before


def test_it_gets_common_and_its_own_arguments(rank):
    own = [{"data": rank.share(1)}]
    assert rank.run_all("add", 1, per_rank_kwargs=own) == [42]
    assert rank.run_all("add", 1, per_rank_kwargs=own, answering=()) == [None]


def test_what_it_raises_is_a_failure_of_the_rank_which_can_be_called_again(rank):
    with pytest.raises(WorkerError) as raised:
        rank.run_all("fail", context="call 1")
    error = raised.value
    found = error.rank, error.method, error.context, error.group, error.usable
    assert found == (0, "fail", "call 1", "policy", True)
    assert isinstance(error.cause, KeyError)
    assert "in fail" in str(error)
    assert rank.run_all("add", 1, data=1) == [42]


def test_a_constructor_that_fails(place):
    with pytest.raises(WorkerError) as raised:
        InProcessRank(Worker, place, (1,), {"fails": True}, name="policy")
    assert isinstance(raised.value.cause, ValueError)
    assert not raised.value.usable


def test_a_signal_ends_a_call_at_once(rank):
    with stop_signals() as signals, pytest.raises(KeyboardInterrupt):
        rank.run_all("interrupt")
    assert exit_status_of(KeyboardInterrupt(), signals) == 130


def test_it_ends_once(rank):
    worker = rank._worker
    rank.shutdown()
    rank.shutdown()
    assert worker.left == [True]
    with pytest.raises(WorkerError):
        rank.run_all("identity")


@pytest.mark.parametrize(
    ("overrides", "engines", "address", "kind"),
    [
        (ONE_RANK, False, "", OneProcess),
        (ONE_RANK, True, "", RayCluster),
        (ONE_RANK, False, "10.0.0.1:6379", RayCluster),
        (["cluster.cpu_workers_per_node=2"], False, "", RayCluster),
    ],
)
def test_a_session_is_for_more_than_one_rank(overrides, engines, address, kind, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert isinstance(open_place(load_config(RECIPE, overrides), engines=engines), kind)


def test_the_commands_do_not_import_ray():
    code = (
        "import sys; from nemo_rl_mcore.tools.evaluate import evaluate, export, generate; "
        "sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
