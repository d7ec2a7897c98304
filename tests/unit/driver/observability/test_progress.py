import io
import math
from contextlib import closing

import pytest
from rich.console import Console

from nemo_rl_mcore.driver.observability.progress import ProgressDisplay

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def make(*, terminal: bool, total: int = 100, **options: int) -> tuple[ProgressDisplay, io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=120, legacy_windows=False, _environ={})
    return ProgressDisplay(total, title="copy", console=console, **options), screen


def step_metrics(step: int) -> dict[str, float]:
    return {
        "train/reward": step / 100,
        "train/loss": -0.5,
        "train/grad_norm": 12.25,
        "performance/tokens_per_sec": 15000.4,
        "timing/generation": 0.25,
        "timing/generation_cpu": 0.2,
    }


def test_elsewhere_than_on_a_terminal_there_are_plain_lines_now_and_then() -> None:
    display, screen = make(terminal=False, total=25, plain_every=10)
    with closing(display):
        for step in range(1, 26):
            display.log(step, step_metrics(step))
    lines = screen.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    assert lines[1] == (
        "step 10/25  reward 0.1  loss -0.5  gradient norm 12.25  tokens/s 15,000"
        "  generation 0.25 s  elapsed 0:00:00"
    )
    assert all(character.isprintable() for line in lines for character in line)


def test_a_terminal_shows_the_latest_step_and_gets_its_cursor_back() -> None:
    display, screen = make(terminal=True)
    with closing(display):
        for step in (1, 40):
            display.log(step, step_metrics(step))
    shown = screen.getvalue()
    last_panel = shown[shown.rindex("copy") :]
    for text in ("step 40/100", "0.4", "-0.5", "12.25", "15,000", "generation 0.25", "left"):
        assert text in last_panel
    assert shown.count(HIDE_CURSOR) == shown.count(SHOW_CURSOR) == 1
    assert shown.index(HIDE_CURSOR) < shown.index(SHOW_CURSOR)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_cursor_comes_back_after_an_error_or_ctrl_c(error: type[BaseException]) -> None:
    display, screen = make(terminal=True)

    def run() -> None:
        with closing(display):
            display.begin()
            raise error

    with pytest.raises(error):
        run()
    assert HIDE_CURSOR in screen.getvalue()
    assert SHOW_CURSOR in screen.getvalue()


def test_metrics_that_are_missing_keep_their_last_value() -> None:
    display, screen = make(terminal=True)
    with closing(display):
        display.log(1, {"validation/accuracy": 0.875})
        display.log(2, {"train/reward": 0.5})
    assert "0.875" in screen.getvalue()[screen.getvalue().rindex("copy") :]


def test_nan_and_values_outside_the_unit_interval_do_not_break_the_panel() -> None:
    display, screen = make(terminal=True)
    with closing(display):
        for step, reward in enumerate((-3.0, math.nan, math.inf, 7.0), start=1):
            display.log(step, {"train/reward": reward, "train/loss": math.nan})
    assert "▁ ██" in screen.getvalue()
    assert "nan" in screen.getvalue()


def test_a_run_that_answers_beside_training_shows_its_buffer_its_age_and_who_waits() -> None:
    metrics = {
        "train/reward": 0.5,
        **{"async/buffer_ready": 3.0, "async/inflight": 13.0},
        **{"async/age_mean": 0.875, "async/age_max": 1.0},
        **{"async/trainer_idle": 0.034, "async/engine_idle": 0.2},
    }
    told = {"buffer": "3 ready, 13 in flight", "age": "0.88, at most 1", "idle": "trainer 3%, engines 20%"}
    display, screen = make(terminal=False)
    with closing(display):
        display.log(1, metrics)
    line = screen.getvalue()
    assert all(f"  {label} {text}" in line for label, text in told.items())
    panel, shown = make(terminal=True)
    with closing(panel):
        panel.log(1, metrics)
    last_panel = shown.getvalue()[shown.getvalue().rindex("copy") :]
    assert all(label in last_panel and text in last_panel for label, text in told.items())


def test_a_divergence_that_nothing_measures_is_not_shown() -> None:
    for value in (0.0, 0.25):
        display, screen = make(terminal=False)
        with closing(display):
            display.log(1, {"train/kl_penalty": value})
        assert ("KL" in screen.getvalue()) is bool(value)


def test_the_lines_over_all_steps_cover_the_run_from_its_first_step_and_from_before_a_resume() -> None:
    display, screen = make(terminal=True, total=1000, steps_before=400)
    rows = [{"step": s, "train/reward": float(s > 200), "timing/total": float(s)} for s in range(1, 401)]
    with closing(display):
        for row in rows[:399]:
            display.take(int(row["step"]), row)
        display.log(400, rows[399])
    last_panel = screen.getvalue()[screen.getvalue().rindex("copy") :]
    assert "▁" * 20 + "█" * 20 in last_panel
    assert "▁▁▁▁▁▁▁▂" not in last_panel
    assert "▇▇▇▇▇▇███" in last_panel, "the time of a step, which goes up"
