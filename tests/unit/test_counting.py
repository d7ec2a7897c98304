"""A run of tests that costs more than its file of counts allows fails, and says what is more."""

import pytest
from counting import ALLOWED, CPU, exceeded

pytestmark = pytest.mark.exhaustive  # of the counter itself


def test_counts_have_no_room_and_seconds_have_some():
    recorded = {"Ray sessions": 2, CPU: 100.0}
    assert exceeded({"Ray sessions": 2, CPU: 100.0 * ALLOWED}, recorded) == []
    more = exceeded({"Ray sessions": 3, CPU: 100.0 * ALLOWED + 1, "Megatron imports": 1}, recorded)
    assert len(more) == 3
