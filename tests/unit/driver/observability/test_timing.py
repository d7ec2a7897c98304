import time

import pytest

from nemo_rl_mcore.driver.observability.timing import PhaseTimer


def test_wall_and_cpu_are_told_apart() -> None:
    timer = PhaseTimer()
    with timer.phase("sleep"):
        time.sleep(0.1)
    with timer.phase("work"):
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass
    metrics = timer.end_step()
    assert set(metrics) == {"timing/sleep", "timing/sleep_cpu", "timing/work", "timing/work_cpu"}
    assert metrics["timing/sleep"] >= 0.1 > 0.05 > metrics["timing/sleep_cpu"]
    assert 0.1 <= metrics["timing/work_cpu"] < 0.2


def test_a_phase_may_repeat_and_steps_start_afresh() -> None:
    timer = PhaseTimer()
    for _ in range(3):
        with timer.phase("a"):
            time.sleep(0.01)
    first = timer.end_step()
    assert first["timing/a"] >= 0.03
    with timer.phase("b"):
        pass
    assert set(timer.end_step()) == {"timing/b", "timing/b_cpu"}
    assert timer.end_step() == {}
    assert timer.totals["a"].wall_s == first["timing/a"]
    assert set(timer.totals) == {"a", "b"}


def test_a_phase_that_raises_is_counted() -> None:
    timer = PhaseTimer()
    with pytest.raises(KeyError), timer.phase("a"):
        raise KeyError
    assert "timing/a" in timer.end_step()
