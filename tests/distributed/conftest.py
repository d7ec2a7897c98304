import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(world_size)`: the session's pool of that size, started anew if a test broke it."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools or not pools[world_size].alive:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool
    for open_pool in pools.values():
        open_pool.close()
