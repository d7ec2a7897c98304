import contextlib
import os
import subprocess
import sys

import pytest

from nemo_rl_mcore.driver.actors.places import (
    only_environment,
    rank_environment,
    session_environment,
    set_ray_import_switches,
)

SECRETS = dict.fromkeys(("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HF_TOKEN"), "s")
KEPT = {
    "PATH": "/bin",
    "HOME": "/home/me",
    "NCCL_DEBUG": "INFO",
    "TORCH_LOGS": "x",
    "CUDA_VISIBLE_DEVICES": "2,3",
}
KEPT |= {"RAY_backend_log_level": "fatal"}
DRIVER = KEPT | SECRETS | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "8"}


def test_the_session_inherits_the_machine_and_no_secret():
    kept = session_environment(DRIVER)
    assert {*DRIVER} & {*kept} == {*KEPT}
    assert kept["RAY_USAGE_STATS_ENABLED"] == "0"


def test_a_rank_inherits_nothing_of_the_drivers_machine_and_has_one_thread_on_cpu_and_no_gpu():
    assert rank_environment(DRIVER, on_cpu=False) == {"NCCL_DEBUG": "INFO", "TORCH_LOGS": "x"}
    kept = rank_environment(DRIVER, on_cpu=True)
    assert (kept["OMP_NUM_THREADS"], kept["CUDA_VISIBLE_DEVICES"]) == ("1", "")


def test_only_environment_restores_after_an_error(monkeypatch):
    monkeypatch.setenv("KEEP_ME", "1")
    before = dict(os.environ)
    with contextlib.suppress(RuntimeError), only_environment({"A": "1"}):
        assert dict(os.environ) == {"A": "1"}
        os.environ["LEAK"] = "1"
        raise RuntimeError
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_ENABLE_UV_RUN_RUNTIME_ENV"])
def test_a_local_session_stays_off_the_network_and_in_the_drivers_environment_unless_asked(name):
    local: dict[str, str] = {}
    set_ray_import_switches(local)
    assert local[name] == "0"
    joined = {"RAY_ADDRESS": "10.0.0.1:6379"}
    set_ray_import_switches(joined)
    assert name not in joined
    chosen = {name: "1"}
    set_ray_import_switches(chosen)
    assert chosen[name] == "1"


# Prints the machine's address, and whether a session there is refused.
STARTS = """
import {first}
import ray.util
from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.driver.actors.cluster import RayCluster
def reached(**_options):
    raise Exception("reached")
ray.init = reached
print(ray.util.get_node_ip_address())
try:
    RayCluster(ClusterConfig(cpu_workers_per_node=1)).__enter__()
except RunStoppedError as error:
    print("refused" if "import" in str(error) else "reached")
"""


@pytest.mark.quick_cases("ray-None-True")
@pytest.mark.parametrize(
    ("first", "switch", "refused"),
    [
        ("ray", None, True),
        ("ray", "0", False),
        ("ray", "1", False),
        ("nemo_rl_mcore.driver.actors", None, False),
    ],
)
@pytest.mark.stage("processes")
def test_a_session_that_ray_would_open_to_every_network_is_refused(first, switch, refused):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    run = subprocess.run(
        [sys.executable, "-c", STARTS.format(first=first)],
        env=kept if switch is None else {**kept, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": switch},
        capture_output=True,
        text=True,
        check=True,
    )
    address, outcome = run.stdout.split()
    assert outcome == ("refused" if refused and address != "127.0.0.1" else "reached")
    assert switch == "1" or refused or address == "127.0.0.1"
