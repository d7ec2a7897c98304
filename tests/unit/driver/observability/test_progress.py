import io
import math

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
    with display:
        for step in range(1, 26):
            display.log(step, step_metrics(step))
    lines = screen.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    assert lines[1] == (
        "step 10/25  reward 0.1  loss -0.5  gradient norm 12.25  tokens/s 15,000"
        "  generation 0.25 s  elapsed 0:00"
    )
    assert all(character.isprintable() for line in lines for character in line)


def test_a_terminal_shows_the_latest_step_and_gets_its_cursor_back() -> None:
    display, screen = make(terminal=True)
    with display:
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
        with display:
            display.begin()
            raise error

    with pytest.raises(error):
        run()
    assert HIDE_CURSOR in screen.getvalue()
    assert SHOW_CURSOR in screen.getvalue()


def test_metrics_that_are_missing_keep_their_last_value() -> None:
    display, screen = make(terminal=True)
    with display:
        display.log(1, {"validation/accuracy": 0.875})
        display.log(2, {"train/reward": 0.5})
    assert "0.875" in screen.getvalue()[screen.getvalue().rindex("copy") :]


def test_nan_and_values_outside_the_unit_interval_do_not_break_the_panel() -> None:
    display, screen = make(terminal=True)
    with display:
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
    with display:
        display.log(1, metrics)
    line = screen.getvalue()
    assert all(f"  {label} {text}" in line for label, text in told.items())
    panel, shown = make(terminal=True)
    with panel:
        panel.log(1, metrics)
    last_panel = shown.getvalue()[shown.getvalue().rindex("copy") :]
    assert all(label in last_panel and text in last_panel for label, text in told.items())


def test_a_run_that_takes_turns_shows_neither_buffer_nor_age() -> None:
    display, screen = make(terminal=False)
    with display:
        display.log(1, step_metrics(1))
    assert not any(word in screen.getvalue() for word in ("buffer", "age ", "idle"))


def test_a_validation_is_shown_with_the_best_one_so_far() -> None:
    display, screen = make(terminal=False, plain_every=1)
    found = [(0.5, 2.0), (0.75, 1.5), (0.25, 1.75)]
    with display:
        for step, (accuracy, loss) in enumerate(found, start=1):
            display.log(step, {"validation/accuracy": accuracy, "validation/loss": loss})
    second, third = screen.getvalue().splitlines()[1:]
    assert "  accuracy 0.75  held-out loss 1.5  " in second
    assert "  accuracy 0.25 (best 0.75 at step 2)  held-out loss 1.75 (best 1.5 at step 2)  " in third


def test_a_run_of_pairs_shows_what_it_prefers_and_by_how_much() -> None:
    display, screen = make(terminal=False)
    with display:
        display.log(
            1,
            {
                **{
                    "train/accuracy": 0.9,
                    "train/preference_accuracy": 0.9,
                    "train/rewards_margin_mean": 1.25,
                },
                **{"validation/accuracy": 0.0, "validation/preference_accuracy": 0.8},
            },
        )
    line = "  accuracy 0  preference accuracy 0.9  held-out preference accuracy 0.8  margin 1.25  "
    assert line in screen.getvalue()


def test_a_divergence_that_nothing_measures_is_not_shown() -> None:
    for value in (0.0, 0.25):
        display, screen = make(terminal=False)
        with display:
            display.log(1, {"train/kl_penalty": value})
        assert ("KL" in screen.getvalue()) is bool(value)


def test_the_panel_tells_the_learning_rate_the_memory_and_the_checkpoint() -> None:
    display, screen = make(terminal=True)
    with display:
        display.log(40, {"train/lr": 0.001, "performance/peak_memory_gib": 12.5, "timing/startup/ray": 3.0})
        display.saved(39)
    last_panel = screen.getvalue()[screen.getvalue().rindex("copy") :]
    assert all(text in last_panel for text in ("learning rate", "0.001", "12.5", "step 39 is saved"))
    assert "startup" not in last_panel


def test_the_lines_over_all_steps_cover_the_run_from_its_first_step_and_from_before_a_resume() -> None:
    display, screen = make(terminal=True, total=1000, steps_before=400)
    rows = [{"step": s, "train/reward": float(s > 200), "timing/total": float(s)} for s in range(1, 401)]
    with display:
        display.recall(rows[:399])
        display.log(400, rows[399])
    last_panel = screen.getvalue()[screen.getvalue().rindex("copy") :]
    assert "▁" * 20 + "█" * 20 in last_panel
    assert "▁▁▁▁▁▁▁▂" not in last_panel
    assert "▇▇▇▇▇▇███" in last_panel, "the time of a step, which goes up"
