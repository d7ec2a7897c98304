import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.observability import RunRecorder, Sample


def make(log_dir: Path, resumed_step: int | None = None) -> RunRecorder:
    console = Console(file=io.StringIO(), width=100)
    return RunRecorder(LoggerConfig(log_dir=str(log_dir)), 10, console=console, resumed_step=resumed_step)


def test_a_step_gets_its_times_and_its_token_rate(tmp_path: Path) -> None:
    with make(tmp_path) as recorder:
        for step in (1, 2):
            with recorder.phase("train"):
                time.sleep(0.05)
            recorder.log(step, {"train/reward": 0.5, "train/total_num_tokens": 100.0})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 0.05 <= row["timing/train"] <= row["timing/total"] < 0.5
        assert row["performance/tokens_per_sec"] == pytest.approx(100 / row["timing/total"])
        assert row["train/reward"] == 0.5


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_run_keeps_its_finished_steps_and_its_report(
    error: type[BaseException], tmp_path: Path
) -> None:
    def run() -> None:
        with make(tmp_path) as recorder:
            recorder.log(1, {"train/reward": 0.5})
            recorder.add_samples([Sample(1, "1>", "1", "1", 1.0, True)])
            raise error

    with pytest.raises(error):
        run()
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "curves.png", "samples.jsonl"}


def test_the_newest_samples_are_kept(tmp_path: Path) -> None:
    with make(tmp_path) as recorder:
        recorder.log(1, {"train/reward": 0.5})
        recorder.add_samples(Sample(step, "1>", "1", "1", 1.0, True) for step in range(1000))
    steps = [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert steps == list(range(1000 - 256, 1000))


def test_the_report_of_a_resumed_run_is_about_the_whole_run(tmp_path: Path) -> None:
    for resumed_step, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        recorder = make(tmp_path, resumed_step)
        with recorder:
            for step in steps:
                recorder.log(step, {"train/reward": 0.5})
    output = recorder._console.file.getvalue()  # type: ignore[attr-defined]
    assert "4 steps; means of" in output
    assert "step 3/10" in output, "the first line of the resumed run"
