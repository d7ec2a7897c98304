import io
from pathlib import Path

import pytest
from rich.console import Console
from written_samples import sample

from nemo_rl_mcore.driver.observability.recorder import Best, best_of, print_report, sample_table

SAMPLE = sample(3, prompt="527>", response="5[red]7|\n", reward=0.5)


def test_the_report_shows_samples_and_files(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    (tmp_path / "rollouts").mkdir()
    print_report(tmp_path, [{"step": 1, "train/reward": 0.5}], [SAMPLE], console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("5[red]7|") == 1
    assert text.replace("\n", "").endswith(f"{tmp_path / 'rollouts'}")


@pytest.mark.parametrize(
    ("name", "best"),
    [("validation/accuracy", Best(250, 1.0)), ("validation/loss", Best(50, 0.0)), ("train/x", Best(50, 0.0))],
)
def test_the_best_value_is_the_highest_of_a_validation_but_for_losses(name: str, best: Best) -> None:
    points = [Best(50, 0.0), Best(250, 1.0), Best(300, 0.75), Best(350, 1.0), Best(400, 0.0)]
    assert best_of(name, points) == best


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    print_report(tmp_path, [], console=console)
    assert "nothing to" in console.file.getvalue()  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == []


def test_a_lone_surrogate_in_an_answer_is_shown_as_its_escape() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(sample_table([sample(response="5\ud8007")]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "5\\ud8007" in text
    text.encode()
