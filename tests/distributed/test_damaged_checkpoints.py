"""A share of the cases of tests/chaos/checkpoint_files.py, which shows them all."""

import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parent.parent / "chaos"


def damaged_and_attacked(folder, every):
    for place in (CHAOS, CHAOS.parent):
        sys.path.insert(0, str(place))
    import checkpoint_files

    return [
        [(one.case, one.way, one.verdict, one.why) for one in findings]
        for findings in checkpoint_files.run(Path(folder), every)
    ]


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.nightly)])
def test_no_damage_goes_unnoticed_and_no_payload_runs(ranks, tmp_path, every):
    damaged, attacked = ranks(1).run(damaged_and_attacked, str(tmp_path), every, timeout_s=600.0)[0]
    assert [one for one in (*damaged, *attacked) if one[2] == "wrong"] == []
    # All that is loaded as it was is loaded without a look at checksums.
    assert {one[1] for one in damaged if one[2] != "refused"} <= {"unverified"}
    cases = {one[0] for one in damaged}, {one[0] for one in attacked}
    assert len(cases[0]) >= 138 // every
    assert len(cases[1]) >= 40 // every
    assert {one[1] for one in damaged} == {"whole", "by hand", "unverified"}
