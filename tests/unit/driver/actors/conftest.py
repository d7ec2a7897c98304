import os
from pathlib import Path

import pytest

from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.driver.actors.cluster import RayCluster

TESTS = Path(__file__).parents[3]
SECRETS = {"WORKERS_TEST_TOKEN": "hunter2", "AWS_SECRET_ACCESS_KEY": "hunter2"}


@pytest.fixture(scope="session")
def cluster():
    """One Ray session for all tests here, started by a driver that holds secrets; its workers see classes of tests."""
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**SECRETS, "PYTHONPATH": paths}.items():
            patch.setenv(name, value)
        with RayCluster(ClusterConfig(cpu_workers_per_node=2)) as running:
            yield running
