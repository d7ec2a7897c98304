"""Some of the faults of faults.py, whose table has all of them."""

import pytest
from faults import FAULTS, Fault, try_fault

SHORT = [fault for fault in FAULTS if fault.short]


@pytest.mark.exhaustive_cases("GCS killed", "two runs in one folder")
@pytest.mark.parametrize("fault", SHORT, ids=lambda fault: fault.name)
def test_a_fault_is_told_in_time_by_name_and_nothing_finished_is_lost(fault: Fault) -> None:
    outcome = try_fault(fault)
    assert not outcome.problems(fault), outcome.said
