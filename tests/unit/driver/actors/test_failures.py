from dataclasses import replace
from typing import cast

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from nemo_rl_mcore.driver.actors.actor import Actor
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.failures import (
    RankIdentity,
    Stall,
    WorkerCall,
    WorkerError,
    describe,
    describe_stall,
    root_cause,
)
from nemo_rl_mcore.errors import PeerLostError


def actor(rank):
    identity = RankIdentity("node7", 40 + rank, f"worker{rank}")
    return Actor(rank, "rank", None, cast("RayCluster", None), lambda: None, identity)


def identity_in(report):
    unknown = Actor(0, "rank", None, cast("RayCluster", None), lambda: None)
    return unknown.failure(RuntimeError(report)).identity


def raised(rank, error):
    report = RayTaskError("train()", f"Traceback\n  frame\n{type(error).__name__}: {error}", error)
    return actor(rank).failure(report)


def died(rank):
    return actor(rank).failure(ActorDiedError())


def hung(rank):
    identity = RankIdentity("node7", 40 + rank, f"worker{rank}")
    return Stall(rank, identity, doing="microbatch 3", stack="in all_reduce")


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([raised(3, ValueError("first")), raised(0, RuntimeError("gloo: closed"))], 3),
        ([raised(0, ValueError("rank 1: bad row")), raised(1, ValueError("bad row"))], 1),
        ([raised(0, KeyError("rank 1: 'x'")), raised(1, KeyError("x"))], 1),
        ([raised(0, RuntimeError("gloo: connection closed")), died(2), died(1)], 2),
    ],
    ids=["the first", "taken over from another rank", "quoted from another rank", "a death"],
)
def test_the_root_cause(failures, rank):
    assert root_cause(failures).rank == rank


def test_the_rank_that_the_others_waited_for_comes_first():
    waited = raised(0, PeerLostError("rank 0 waited in vain for the other ranks before train"))
    lines = describe([waited], [hung(2)], "train (step 4)", None).splitlines()
    assert lines[:3] == [
        "rank 2 (host node7, pid 42) did not return from train (step 4): it last began 'microbatch 3'",
        "after it:",
        "  rank 0: PeerLostError: rank 0 waited in vain for the other ranks before train",
    ]


def test_a_rank_that_does_not_answer_comes_before_those_that_wait_for_it():
    waited = raised(2, PeerLostError("rank 2 waited in vain for the other ranks before train"))
    at_the_meeting = replace(hung(0), stack="in raise_together")
    silent = Stall(3, None, silent=": its process is stopped")
    first, *_ = describe([waited], [at_the_meeting, silent], "train (step 4)", None).splitlines()
    assert first.startswith("rank 3 (starting) ")
    first, *_ = describe_stall([at_the_meeting, hung(1)], 4, WorkerCall("train", "", 30)).splitlines()
    assert first.index(" rank 1 ") < first.index(" rank 0 ")


def test_describe_adds_the_end_of_standard_error_of_a_death(tmp_path):
    (tmp_path / "worker-worker1-01000000-41.err").write_text(
        ":job_id:1\n" + "".join(f"{i}\n" for i in range(50))
    )
    (tmp_path / "worker-worker0-01000000-40.err").write_text("another rank\n")
    text = describe([died(1)], [], "train", tmp_path)
    assert text.splitlines()[-31:] == [
        "--- rank 1, end of its standard error ---",
        *(str(i) for i in range(20, 50)),
    ]


def test_identity_is_read_from_either_form_of_report():
    assert identity_in("ray::W.f() (pid=57, ip=10.0.0.3, actor_id=9)") == RankIdentity("10.0.0.3", 57, "")
    assert identity_in("\tpid: 57\n\tnamespace: x\n\tip: 10.0.0.3\nThe") == RankIdentity("10.0.0.3", 57, "")
    lost = "The actor died because its node has died. Node Id: 907d2e5b\n\tpid: 57\n\tip: 10.0.0.3"
    assert identity_in(lost) == RankIdentity("10.0.0.3", 57, "", "907d2e5b")
    assert identity_in("nothing") == RankIdentity("unknown", 0, "")


def test_a_machine_that_is_gone_is_told_in_place_of_the_rank():
    lost = replace(died(1), lost_node="7dda3180 (10.0.0.3)")
    message = describe([raised(0, RuntimeError("gloo: closed")), lost], [], "train (step 4)", None)
    assert message.startswith(
        "rank 1 (host node7, pid 41) was lost in train (step 4): node 7dda3180 (10.0.0.3) is gone\n"
    )
    assert WorkerError(message, WorkerCall("train"), lost).lost_node == "7dda3180 (10.0.0.3)"
    assert WorkerError(message, WorkerCall("train"), died(1)).lost_node is None


def test_the_machine_of_a_rank_that_hangs_is_told():
    silent = replace(hung(0), silent="", lost_node="7dda3180 (10.0.0.3)")
    first, *_ = describe_stall([silent], 4, WorkerCall("train", "", 30)).splitlines()
    assert "node 7dda3180 (10.0.0.3)" in first
