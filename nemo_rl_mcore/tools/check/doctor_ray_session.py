"""The Ray session that a run would have here: one of its own, or a cluster at RAY_ADDRESS that answers."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl_mcore.driver.actors.gcs_probe import probe
from nemo_rl_mcore.tools.check.doctor_children import Answer, Question
from nemo_rl_mcore.tools.check.doctor_findings import Finding, Status, ok

_KEY = "cluster"
_NAME = "session"


def unreachable(address: str) -> dict[str, Answer]:
    """Return the answer where nothing listens at RAY_ADDRESS; none where Ray itself is to join what may be a cluster.

    Ray would go on trying for minutes.
    """
    try:
        probe(address)
    except (OSError, ValueError) as error:
        return {_KEY: Answer(failure=str(error))}
    return {}


def question(address: str) -> dict[str, Question]:
    """Return what to ask of the cluster at RAY_ADDRESS; nothing without one."""
    return {_KEY: ("ray_cluster", address)} if address else {}


def finding(address: str, answers: Mapping[str, Answer]) -> Finding:
    """Say what a run starts or joins."""
    if not address:
        return ok(_NAME, "RAY_ADDRESS is not set: each run starts a session of this machine alone")
    if failure := answers[_KEY].failure:
        what = f"the cluster at RAY_ADDRESS={address} cannot be joined: {failure}"
        mend = "unset RAY_ADDRESS; or start the cluster, on its first machine: ray start --head"
        return Finding(_NAME, Status.WRONG, what, "every run", mend, True)
    gpus = ", ".join(f"{there:g}" for there in gpus_by_machine(address, answers) or ())
    return ok(_NAME, f"the cluster at RAY_ADDRESS={address}, of machines with [{gpus}] GPUs")


def gpus_by_machine(address: str, answers: Mapping[str, Answer]) -> list[float] | None:
    """Return how many GPUs each machine of the cluster has, none where it does not answer; None without RAY_ADDRESS."""
    return [one["gpus"] for one in answers[_KEY].facts.get("machines", ())] if address else None
