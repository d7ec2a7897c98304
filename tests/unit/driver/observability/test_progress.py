import io
import math

from rich.console import Console

from nemo_rl_mcore.driver.observability.recorder import ProgressDisplay


def make(*, terminal: bool, total: int = 100, **options: int) -> tuple[ProgressDisplay, io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=120, legacy_windows=False, _environ={})
    return ProgressDisplay(total, console=console, **options), screen


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
    for step in range(1, 26):
        display.log(step, step_metrics(step))
    lines = screen.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    assert lines[1] == (
        "step 10/25  reward 0.1  loss -0.5  gradient norm 12.25  tokens/s 15,000"
        "  generation 0.25 s  elapsed 0:00:00"
    )
    assert all(character.isprintable() for line in lines for character in line)


def test_a_terminal_shows_each_step_and_the_time_left() -> None:
    display, screen = make(terminal=True, total=5, steps_before=2)
    for step in (3, 4, 5):
        display.log(step, step_metrics(step))
    lines = screen.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["3/5", "4/5", "5/5"]
    assert all("  left 0:00:0" in line for line in lines)


def test_a_validation_is_shown_with_its_best_value_also_from_before_a_resume() -> None:
    display, screen = make(terminal=False, steps_before=2)
    display.take(1, {"validation/accuracy": 0.875, "validation/loss": 0.5})
    display.log(3, {"validation/accuracy": 0.5, "validation/loss": 0.25, "train/reward": math.nan})
    assert "  accuracy 0.5 (best 0.875 at step 1)  held-out loss 0.25  " in screen.getvalue()
    assert "reward nan" in screen.getvalue()


def test_a_run_that_answers_beside_training_shows_its_buffer_its_age_and_who_waits() -> None:
    metrics = {
        "train/reward": 0.5,
        **{"async/buffer_ready": 3.0, "async/inflight": 13.0},
        **{"async/age_mean": 0.875, "async/age_max": 1.0},
        **{"async/trainer_idle": 0.034, "async/engine_idle": 0.2},
    }
    told = {"buffer": "3 ready, 13 in flight", "age": "0.88, at most 1", "idle": "trainer 3%, engines 20%"}
    display, screen = make(terminal=False)
    display.log(1, metrics)
    line = screen.getvalue()
    assert all(f"  {label} {text}" in line for label, text in told.items())


def test_a_divergence_that_nothing_measures_is_not_shown() -> None:
    for value in (0.0, 0.25):
        display, screen = make(terminal=False)
        display.log(1, {"train/kl_penalty": value})
        assert ("KL" in screen.getvalue()) is bool(value)
