"""Which machines are there, of a session of one; tests/chaos/kill_table.py has several."""

import time

import pytest
import ray
from refusals import assert_holds, refused

from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.driver.actors import cluster as clusters
from nemo_rl_mcore.driver.actors.cluster import RayCluster, await_nodes

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.stage("processes")]
ROOM, TWO = {"CPU": 0.1}, ClusterConfig(num_nodes=2)


def test_others_are_waited_for_and_told(capsys):
    start = time.monotonic()
    assert await_nodes(2, ROOM, within_s=1.5) == 1
    assert 1.5 <= time.monotonic() - start < 10
    assert_holds(capsys.readouterr().err, 1, 2, "(cluster.num_nodes)", "1.5 s")


def test_a_machine_without_room_does_not_count():
    assert await_nodes(1, {"CPU": 1000.0}, within_s=0.1) == 0


def test_a_machine_is_gone_when_its_raylet_does_not_answer_or_ray_says_so(monkeypatch):
    [node] = ray.nodes()
    mine, lost_nodes = node["NodeID"], RayCluster(TWO).lost_nodes
    assert lost_nodes([mine]) == {}
    silent = {**node, "NodeManagerPort": 1}
    for gone in (silent, {**node, "Alive": False}):
        monkeypatch.setattr(clusters.ray, "nodes", lambda gone=gone: [gone])
        assert lost_nodes([mine]) == {mine: f"{mine[:8]} (127.0.0.1)"}
        assert lost_nodes(["another"]) == {}
        assert await_nodes(1, ROOM, within_s=0.1) == 0


def test_a_local_session_is_lost_as_a_whole(monkeypatch, cluster):
    [node] = ray.nodes()
    mine = node["NodeID"]
    joined = RayCluster(TWO)
    assert joined.lost_nodes([mine, ""]) == {}
    monkeypatch.setattr(clusters.ray, "nodes", lambda: [{**node, "Alive": False}])
    assert joined.lost_nodes([mine, ""]) == {mine: f"{mine[:8]} (127.0.0.1)"}
    assert cluster.lost_nodes([mine]) == {}


def test_machines_that_stay_gone_end_a_run_as_those_that_ray_lacks_and_one_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(clusters, "NODE_WAIT_S", 0.5)
    with refused("missing-machines", 1, 2, "0.5 s"):
        RayCluster(TWO).await_machines()
    with refused("missing-machines", "cluster.num_nodes=2", 1):
        RayCluster(TWO).__enter__()
    RayCluster(ClusterConfig(cpu_workers_per_node=1000)).await_machines()
