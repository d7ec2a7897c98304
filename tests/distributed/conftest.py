import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rank_pool import Ranks

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before `thin_out`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.stage("distributed"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(world_size)`: as many of the session's processes, in a process group."""
    ranks = Ranks()
    yield ranks
    ranks.close()
