"""Which machines, GPUs and processes an engine has that is larger than a machine, and what its processes are told."""

import os
import signal
import subprocess
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from fake_generation import kind
from processes import left_after
from ray.util.placement_group import PlacementGroup

from nemo_rl_mcore.config import ClusterConfig, GenerationConfig
from nemo_rl_mcore.config.generation import ColocatedConfig
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.engine_generation import place_engines, shares_of, transport_of
from nemo_rl_mcore.driver.actors.failures import WorkerError
from nemo_rl_mcore.driver.actors.gang import RayWorkerGroup
from nemo_rl_mcore.driver.actors.places import Placement, RankSlot
from nemo_rl_mcore.engine.vllm.engine import EngineMachines, on_this_machine


@pytest.mark.parametrize(("per_node", "nodes"), [(1, 6), (2, 6), (4, 4), (8, 3)])
def test_engines_have_every_place_once(per_node, nodes):
    places = per_node * nodes
    for size in [size for size in range(1, places + 1) if not places % size]:
        if per_node % size and size % per_node:
            continue
        shares = [shares_of(engine, size, per_node) for engine in range(places // size)]
        assert {sum(count for _, _, count in of_engine) for of_engine in shares} == {size}
        assert {count for of_engine in shares for _, _, count in of_engine} == {min(size, per_node)}
        held = [
            (node, first + at)
            for of_engine in shares
            for node, first, count in of_engine
            for at in range(count)
        ]
        assert held == [divmod(place, per_node) for place in range(places)], size


def cluster_of(monkeypatch, **keys):
    cluster = RayCluster(ClusterConfig(**keys))
    monkeypatch.setattr(cluster, "address_of", lambda group, bundle=0: f"10.0.0.{bundle}")
    return cluster


def told(slot):
    with patch.dict(os.environ, {**slot.environment, "MASTER_PORT": "7"}, clear=True):
        return on_this_machine()


def bundle(slot):
    return slot.options["scheduling_strategy"].placement_group_bundle_index


GPUS = tuple(f"GPU-{number}" for number in range(8))


@pytest.mark.parametrize(
    ("nodes", "processes", "engines", "bundles"),
    [(2, 2, [0, 1, 2, 3], [0, 0, 1, 1]), (4, 4, [0, 0, 1, 1], [0, 1, 2, 3])],
)
def test_colocated_engines_see_the_gpus_of_consecutive_ranks(monkeypatch, nodes, processes, engines, bundles):
    cluster = cluster_of(monkeypatch, num_nodes=nodes, gpus_per_node=8 // nodes)
    ranks = Placement((), PlacementGroup.empty())
    placed = place_engines(cluster, kind(processes=processes), ColocatedConfig(), ranks, GPUS)
    assert [slot.rank for slot in placed.slots] == engines
    assert [bundle(slot) for slot in placed.slots] == bundles
    seen = [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in placed.slots]
    assert seen == ["GPU-0,GPU-1", "GPU-2,GPU-3", "GPU-4,GPU-5", "GPU-6,GPU-7"]
    assert {slot.options["num_gpus"] for slot in placed.slots} == {0}, "Ray has given them to the ranks"
    assert placed.group is None, "the ranks give their GPUs back themselves"
    assert [told(slot) for slot in placed.slots] == [
        None if nodes == 2 else EngineMachines(f"10.0.0.{at - at % 2}", f"10.0.0.{at}", at % 2, 2, 7)
        for at in range(4)
    ]


def test_engines_apart_have_the_gpus_of_whole_machines(monkeypatch):
    cluster, reserved = cluster_of(monkeypatch, num_nodes=1, gpus_per_node=4), []
    group = PlacementGroup.empty()
    monkeypatch.setattr(cluster, "reserve", lambda *asked: reserved.append(asked) or group)
    apart = ColocatedConfig.model_validate(
        {"enabled": False, "resources": {"gpus_per_node": 4, "num_nodes": 4}}
    )
    placed = place_engines(cluster, kind(processes=8), apart, Placement(()), [])
    assert reserved == [({"GPU": 4, "CPU": 4}, 4)]
    assert [(slot.rank, bundle(slot), slot.options["num_gpus"]) for slot in placed.slots] == [
        (0, 0, 4), (0, 1, 4), (1, 2, 4), (1, 3, 4),
    ]  # fmt: skip
    assert [slot.environment["NODE_RANK"] for slot in placed.slots] == ["0", "1", "0", "1"]
    assert placed.group is group


def test_an_engine_of_one_machine_is_told_of_no_other(monkeypatch):
    monkeypatch.setenv("NNODES", "3")
    cluster = cluster_of(monkeypatch, num_nodes=2, gpus_per_node=2)
    ranks = Placement((), PlacementGroup.empty())
    placed = place_engines(cluster, kind(), ColocatedConfig(), ranks, ["GPU"] * 4)
    assert [told(slot) for slot in placed.slots] == [None] * 4


def test_engines_on_cpu_have_a_process_for_each_rank_of_a_machine(monkeypatch):
    cluster = cluster_of(monkeypatch, num_nodes=2, cpu_workers_per_node=2)
    ranks = Placement((), PlacementGroup.empty())
    placed = place_engines(cluster, kind(engines=2, processes=4), ColocatedConfig(), ranks, [])
    assert [(slot.rank, bundle(slot)) for slot in placed.slots] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {slot.options["num_cpus"] for slot in placed.slots} == {0}, "Ray has given them to the ranks"
    assert [slot.environment["NODE_RANK"] for slot in placed.slots] == ["0", "1", "0", "1"]


class First:
    def __init__(self):
        self.asked = 0

    def ask(self):
        self.asked += 1
        return self.asked


class Part:
    """What the first one has on another machine: it knows no call but `serve`."""

    def __init__(self):
        self.process = subprocess.Popen(["sleep", "600"])

    def serve(self):
        Path(os.environ["SERVED"]).write_text(str(self.process.pid))
        self.process.wait()


@pytest.fixture
def engine(cluster, tmp_path):
    served = tmp_path / "served"
    slots = tuple(RankSlot(3, {"SERVED": str(served)}, {"num_cpus": 0.1}) for _ in range(2))
    started = RayWorkerGroup(
        First, cluster, placement=Placement(slots), share_class=Part, name="vLLM", noun="engine", call_timeout_s=60
    )  # fmt: skip
    while not served.exists():
        time.sleep(0.05)
    yield started, int(served.read_text())
    started.shutdown()


@pytest.mark.stage("processes")
def test_of_an_engine_over_machines_the_first_actor_alone_is_called(engine):
    started, _ = engine
    assert [started.run_all("ask") for _ in range(2)] == [[1], [2]]
    assert len(started.identities) == 2


@pytest.mark.stage("processes")
def test_an_engine_ends_with_what_it_has_on_another_machine(engine):
    started, below = engine
    os.kill(below, signal.SIGKILL)
    first = started.members[0]
    assert not left_after(30, [first.identity.pid]), "it goes on without a part of itself"
    with pytest.raises(WorkerError, match="vLLM engine 3"):
        started.run_all("ask")


def generation(**keys):
    return GenerationConfig.model_validate({"backend": "vllm", "max_new_tokens": 4, **keys})


APART = {"colocated": {"enabled": False, "resources": {"gpus_per_node": 2}}}


@pytest.mark.parametrize(
    ("cluster", "keys", "transport"),
    [
        ({}, {}, "shared_memory"),
        ({}, APART, "shared_memory"),
        ({"num_nodes": 2}, {}, "ray"),
        ({}, {"refit_transport": "ray"}, "ray"),
        ({"gpus_per_node": 4}, {}, "cuda_ipc"),
        ({"gpus_per_node": 4}, APART, "nccl"),
        ({"gpus_per_node": 4}, {"refit_transport": "nccl"}, "nccl"),
    ],
)
def test_the_transport_follows_the_machines(cluster, keys, transport):
    assert transport_of(RayCluster(ClusterConfig.model_validate(cluster)), generation(**keys)) == transport


def test_engines_on_cpu_are_processes_of_their_own(monkeypatch):
    monkeypatch.setenv("WORKERS_TEST_TOKEN", "hunter2")
    cluster = RayCluster(ClusterConfig())
    placed = place_engines(
        cluster, kind(environment={"ENGINES_OWN": "1"}), ColocatedConfig(), Placement(()), []
    )
    assert [slot.rank for slot in placed.slots] == [0, 1]
    for slot in placed.slots:
        assert slot.options["num_gpus"] == 0
        assert slot.environment["GLOO_SOCKET_IFNAME"] == "lo"
        assert slot.environment["ENGINES_OWN"] == "1"
        assert "WORKERS_TEST_TOKEN" not in slot.environment


@pytest.mark.parametrize(("resources", "engines"), [({}, 3), ({"gpus_per_node": 4}, 2)])
def test_engines_apart_have_the_gpus_that_are_given_or_as_many_as_they_need(monkeypatch, resources, engines):
    cluster = RayCluster(ClusterConfig(gpus_per_node=4))
    reserved = []
    monkeypatch.setattr(cluster, "reserve", lambda *asked: reserved.append(asked) or PlacementGroup.empty())
    colocated = ColocatedConfig.model_validate({"enabled": False, "resources": resources})
    placed = place_engines(cluster, kind(engines=3, processes=2), colocated, Placement(()), [])
    assert reserved == [({"GPU": 2 * engines, "CPU": 2 * engines}, 1)]
    assert [slot.options["num_gpus"] for slot in placed.slots] == [2] * engines


def test_a_second_model_shares_the_gpus_of_the_first_rank_by_rank():
    cluster = RayCluster(ClusterConfig(gpus_per_node=4))
    first = Placement((), PlacementGroup.empty())
    placed = cluster.place_colocated(first, GPUS[:4])
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in placed.slots] == [*GPUS[:4]]
    assert {slot.options["num_gpus"] for slot in placed.slots} == {0}
    assert [slot.environment["RANK"] for slot in placed.slots] == ["0", "1", "2", "3"]
    assert placed.group is None  # the GPUs are the first group's to give back
