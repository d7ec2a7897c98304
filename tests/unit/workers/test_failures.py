from pathlib import Path

from ray.exceptions import ActorDiedError, RayTaskError

from nemo_rl_mcore.workers.failures import (
    RankFailure,
    RankIdentity,
    describe,
    identity_in,
    root_cause,
    stderr_tail,
)


def raised(rank: int, error: Exception) -> RankFailure:
    report = RayTaskError("train()", f"Traceback\n  frame\n{type(error).__name__}: {error}", error)
    return RankFailure(rank, RankIdentity("node7", 40 + rank, f"worker{rank}"), report)


def died(rank: int) -> RankFailure:
    return RankFailure(rank, RankIdentity("node7", 40 + rank, f"worker{rank}"), ActorDiedError())


def test_the_first_to_raise_is_the_root_cause() -> None:
    failures = [raised(3, ValueError("first")), raised(0, RuntimeError("gloo: connection closed"))]
    assert root_cause(failures).rank == 3


def test_a_death_comes_before_the_errors_it_causes() -> None:
    assert root_cause([raised(0, RuntimeError("gloo: connection closed")), died(2), died(1)]).rank == 2


def test_describe_tells_the_root_in_full_and_the_others_in_a_line() -> None:
    failures = [raised(1, ValueError("bad row\nmore")), raised(0, RuntimeError("gloo: closed"))]
    assert describe(failures, [2], "train (step 4)", None).splitlines() == [
        "rank 1 (host node7, pid 41) failed in train (step 4): ValueError: bad row",
        "after it:",
        "  rank 0: RuntimeError: gloo: closed",
        "  rank 2: still waiting, stopped",
        "--- rank 1, as reported ---",
        "Traceback",
        "  frame",
        "ValueError: bad row",
        "more",
    ]


def test_an_exception_without_text_keeps_its_type() -> None:
    assert raised(0, AssertionError()).headline() == "AssertionError: "


def test_describe_adds_the_end_of_standard_error_of_a_death(tmp_path: Path) -> None:
    (tmp_path / "worker-worker1-01000000-41.err").write_text(
        ":job_id:1\n" + "".join(f"{i}\n" for i in range(50))
    )
    (tmp_path / "worker-worker0-01000000-40.err").write_text("another rank\n")
    text = describe([died(1)], [], "train", tmp_path)
    assert text.splitlines()[-31:] == [
        "--- rank 1, end of its standard error ---",
        *(str(i) for i in range(20, 50)),
    ]


def test_no_tail_without_a_log_folder_or_a_worker_id(tmp_path: Path) -> None:
    assert stderr_tail(None, RankIdentity("h", 1, "worker1")) == ""
    assert stderr_tail(tmp_path, RankIdentity("h", 1, "")) == ""
    assert stderr_tail(tmp_path, RankIdentity("h", 1, "worker1")) == ""


def test_identity_is_read_from_either_form_of_report() -> None:
    assert identity_in("ray::W.f() (pid=57, ip=10.0.0.3, actor_id=9)") == RankIdentity("10.0.0.3", 57, "")
    assert identity_in("\tpid: 57\n\tnamespace: x\n\tip: 10.0.0.3\nThe") == RankIdentity("10.0.0.3", 57, "")
    assert identity_in("nothing") == RankIdentity("unknown", 0, "")
