"""Which machines are there, of a session of one; tests/functional/test_nodes.py has several."""

import time

import pytest
import ray
from refusals import assert_holds, refused

from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.driver.actors import cluster as clusters
from nemo_rl_mcore.driver.actors.cluster import RayCluster, await_nodes

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.stage("processes")]
ROOM = {"CPU": 0.1}


def two_machines(**keys: object) -> ClusterConfig:
    return ClusterConfig.model_validate({"num_nodes": 2, **keys})


def test_machines_that_are_there_are_not_waited_for() -> None:
    start = time.monotonic()
    assert await_nodes(1, ROOM, within_s=60) == 1
    assert time.monotonic() - start < 5


def test_others_are_waited_for_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    assert await_nodes(2, ROOM, within_s=1.5) == 1
    assert 1.5 <= time.monotonic() - start < 10
    assert_holds(capsys.readouterr().err, 1, 2, "(cluster.num_nodes)", "1.5 s")


def test_a_machine_without_room_does_not_count() -> None:
    assert await_nodes(1, {"CPU": 1000.0}, within_s=0.1) == 0


def test_a_machine_is_gone_when_its_raylet_does_not_answer_or_ray_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [node] = ray.nodes()
    mine, lost_nodes = node["NodeID"], RayCluster(two_machines()).lost_nodes
    assert lost_nodes([mine]) == {}
    silent = {**node, "NodeManagerPort": 1}
    for gone in (silent, {**node, "Alive": False}):
        monkeypatch.setattr(clusters.ray, "nodes", lambda gone=gone: [gone])
        assert lost_nodes([mine]) == {mine: f"{mine[:8]} (127.0.0.1)"}
        assert lost_nodes(["another"]) == {}
        assert await_nodes(1, ROOM, within_s=0.1) == 0


def test_a_local_session_is_lost_as_a_whole(monkeypatch: pytest.MonkeyPatch, cluster: RayCluster) -> None:
    [node] = ray.nodes()
    mine = node["NodeID"]
    joined = RayCluster(two_machines())
    assert joined.lost_nodes([mine, ""]) == {}
    monkeypatch.setattr(clusters.ray, "nodes", lambda: [{**node, "Alive": False}])
    assert joined.lost_nodes([mine, ""]) == {mine: f"{mine[:8]} (127.0.0.1)"}
    assert cluster.lost_nodes([mine]) == {}


def test_the_end_of_a_run_whose_machines_stay_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "NODE_WAIT_S", 0.5)
    with refused("missing-machines", 1, 2, "0.5 s"):
        RayCluster(two_machines()).await_machines()


def test_one_machine_is_not_waited_for() -> None:
    running = RayCluster(ClusterConfig(cpu_workers_per_node=1000))
    running.await_machines()


def test_machines_that_ray_lacks_are_told_at_the_start() -> None:
    with refused("missing-machines", "cluster.num_nodes=2", 1):
        RayCluster(two_machines()).__enter__()
