import io
import math
from pathlib import Path

from refusals import assert_holds
from rich.console import Console
from written_samples import sample

from nemo_rl_mcore.driver.observability.progress import print_report, sample_table, summary_tables

SAMPLE = sample(3, prompt="527>", response="5[red]7|\n", reward=0.5)


def make_rows(count: int) -> list[dict[str, float]]:
    return [
        {
            "step": s,
            "train/reward": s / count,
            "train/loss": math.nan if s == 2 else 1.0 / s,
            "timing/train": 0.5,
        }
        for s in range(1, count + 1)
    ]


def printed(report: object) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(report)
    return console.file.getvalue()  # type: ignore[attr-defined]


def cells(text: str, metric: str) -> list[str]:
    line = next(line for line in text.splitlines() if metric in line)
    return [cell.strip() for cell in line.strip("│ ").split("│")]


def test_the_summary_has_the_means_of_the_first_and_last_steps_and_the_range() -> None:
    text = printed(summary_tables(make_rows(100))[0])
    assert_holds(text, "100 steps; ", 5, 20)
    assert cells(text, "train/reward") == ["train/reward", "0.03", "0.905", "0.01", "1"]
    finite = [1, *(1 / s for s in range(3, 101))]
    assert cells(text, "train/loss")[1] == f"{sum(finite[:5]) / 5:.4g}"
    assert "timing/train" in text


def test_a_validation_before_the_first_step_is_no_step() -> None:
    rows = [{"step": 0.0, "validation/reward": 0.5}, *make_rows(3)]
    assert "3 steps; " in printed(summary_tables(rows)[0])


def test_cpu_times_and_metrics_without_a_finite_value_have_no_line() -> None:
    row = {"step": 1, "train/reward": math.nan, "timing/train": 1.0, "timing/train_cpu": 1.0}
    text = printed(summary_tables([row])[0])
    assert "timing/train " in text
    assert "_cpu" not in text
    assert "reward" not in text


def test_the_report_shows_samples_and_files(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    (tmp_path / "rollouts").mkdir()
    print_report(tmp_path, make_rows(30), [SAMPLE], console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("5[red]7|") == 1
    assert text.replace("\n", "").endswith(f"{tmp_path / 'rollouts'}")


def test_what_only_some_steps_have_is_told_by_its_first_best_and_last_value() -> None:
    rows = make_rows(300)
    for step, accuracy, loss in ((50, 0.0, 3.0), (250, 1.0, 2.0), (300, 0.75, 2.5)):
        rows[step - 1] |= {"validation/accuracy": accuracy, "validation/loss": loss, "timing/validation": 1.0}
    text = printed(summary_tables(rows)[1])
    assert cells(text, "validation/accuracy")[1:] == ["0", "1", "250", "0.75"]
    assert cells(text, "validation/loss")[1:] == ["3", "2", "250", "2.5"]
    assert "timing/validation" in text
    assert "train/reward" not in text
    assert "validation" not in printed(summary_tables(rows)[0])


def test_a_validation_of_every_step_is_no_mean_either() -> None:
    rows = [{"step": step, "validation/reward": step / 10} for step in range(1, 4)]
    assert cells(printed(summary_tables(rows)[1]), "validation/reward")[1:] == ["0.1", "0.3", "3", "0.3"]
    assert summary_tables(rows)[0].row_count == 0


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    print_report(tmp_path, [], console=console)
    assert "nothing to" in console.file.getvalue()  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == []


ASYNC_ROW = {
    **{"async/age_mean": 0.9, "async/age_max": 1.0, "async/age_0": 0.1, "async/age_1": 0.9},
    **{
        "async/buffer_ready": 3.0,
        "async/inflight": 13.0,
        "async/trainer_idle": 0.1,
        "async/engine_idle": 0.2,
    },
    **{"async/mixed_versions": 0.25, "async/ess": 0.97, "async/importance_ratio_max": 1.7},
    "async/behaviour_kl": 0.003,
}


def test_the_summary_tells_age_idleness_and_correction_and_what_was_lost() -> None:
    rows = [{**row, **ASYNC_ROW} for row in make_rows(3)]
    rows[1]["async/requeued/timeout"] = 2.0
    text = printed(summary_tables(rows)[0])
    shares = {"async/age_0", "async/age_1"}
    for metric in {*ASYNC_ROW} - shares:
        assert f"{metric} " in text
    assert cells(printed(summary_tables(rows)[1]), "async/requeued/timeout")[1:] == ["2", "2", "2", "2"]
    assert not any(f"{metric} " in text for metric in shares)


def test_a_lone_surrogate_in_an_answer_is_shown_as_its_escape() -> None:
    text = printed(sample_table([sample(response="5\ud8007")]))
    assert "5\\ud8007" in text
    text.encode()
