import pytest
from ray.util.placement_group import PlacementGroup

from nemo_rl_mcore.config import ClusterConfig, GenerationConfig
from nemo_rl_mcore.config.generation import ColocatedConfig
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.engine_generation import place_engines, transport_of
from nemo_rl_mcore.driver.actors.places import Placement
from nemo_rl_mcore.engine.engine import EngineKind

GPUS = tuple(f"GPU-{number}" for number in range(8))


def generation(**keys):
    return GenerationConfig.model_validate({"backend": "vllm", "max_new_tokens": 4, **keys})


def kind(engines=1, processes=1):
    return EngineKind(
        name="tiny", engine=object, settings=None, environment={"ENGINES_OWN": "1"}, engines=engines,
        processes=processes, sleeps=False, bucket_bytes=64, call_timeout_s=1,
        max_restarts=0,
    )  # fmt: skip


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
    placed = place_engines(cluster, kind(engines=2), ColocatedConfig(), Placement(()), [])
    assert [slot.rank for slot in placed.slots] == [0, 1]
    for slot in placed.slots:
        assert slot.options["num_gpus"] == 0
        assert slot.environment["GLOO_SOCKET_IFNAME"] == "lo"
        assert slot.environment["ENGINES_OWN"] == "1"
        assert "WORKERS_TEST_TOKEN" not in slot.environment


def test_colocated_engines_see_the_gpus_of_consecutive_ranks_of_one_machine():
    cluster = RayCluster(ClusterConfig(num_nodes=2, gpus_per_node=4))
    ranks = Placement((), PlacementGroup.empty())
    placed = place_engines(cluster, kind(processes=2), ColocatedConfig(), ranks, GPUS)
    seen = [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in placed.slots]
    assert seen == ["GPU-0,GPU-1", "GPU-2,GPU-3", "GPU-4,GPU-5", "GPU-6,GPU-7"]
    nodes = [slot.options["scheduling_strategy"].placement_group_bundle_index for slot in placed.slots]
    assert nodes == [0, 0, 1, 1]
    assert {slot.options["num_gpus"] for slot in placed.slots} == {0}, "Ray has given them to the ranks"
    assert placed.group is None, "the ranks give their GPUs back themselves"


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
