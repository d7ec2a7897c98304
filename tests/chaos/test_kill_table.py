"""Some rows of kill_table.py, whose table has all of them."""

import pytest
from kill_table import Row, rows, try_row

SHORT = (
    "rank killed in forward, synchronous",
    "rank raising, K = 0",
    "engine killed decoding, K = 1",
    "critic's rank killed in finish, PPO, K = 1",
    "driver killed, K = 1, agents",
)


@pytest.mark.exhaustive_cases(SHORT[0])
@pytest.mark.parametrize("row", [row for row in rows() if row.name in SHORT], ids=lambda row: row.name)
def test_what_is_killed_is_told_at_once_and_each_group_is_trained_once(row: Row, tmp_path) -> None:
    found = try_row(row, tmp_path)
    assert not found.wrong
