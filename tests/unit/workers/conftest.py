import os
from collections.abc import Iterator

import pytest

from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.workers.cluster import RayCluster

SECRETS = {"WORKERS_TEST_TOKEN": "hunter2", "AWS_SECRET_ACCESS_KEY": "hunter2"}


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    """One Ray session for all tests here, started by a driver that holds secrets."""
    os.environ.update(SECRETS)
    try:
        with RayCluster(ClusterConfig(cpu_workers_per_node=2)) as running:
            yield running
    finally:
        for name in SECRETS:
            del os.environ[name]
