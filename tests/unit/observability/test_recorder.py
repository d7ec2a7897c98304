import errno
import io
import json
import os
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.errors import FolderError
from nemo_rl_mcore.observability import RunRecorder, Sample
from nemo_rl_mcore.signals import stop_signals


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


def rows_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_room_is_kept_for_the_end_and_given_back(tmp_path: Path) -> None:
    with make(tmp_path) as recorder:
        recorder.log(1, {"train/reward": 0.5})
        assert (tmp_path / ".reserve").stat().st_blocks * 512 >= 1 << 19
    assert not (tmp_path / ".reserve").exists()


def test_a_deleted_folder_ends_the_run_and_every_row_is_written_anew(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def run() -> None:
        with make(folder) as recorder:
            for step in (1, 2, 3):
                if step == 3:
                    shutil.rmtree(folder)
                recorder.log(step, {"train/reward": 0.5})

    with pytest.raises(
        FolderError, match=r"^logger\.log_dir: .*run cannot be written to: the folder is gone"
    ):
        run()
    assert rows_of(folder) == [1, 2, 3]
    assert {path.name for path in folder.iterdir()} == {"metrics.jsonl", "curves.png"}


def test_a_folder_that_was_deleted_behind_the_last_step_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with make(folder) as recorder:
        for step in (1, 2):
            recorder.log(step, {"train/reward": 0.5})
        shutil.rmtree(folder)
    assert rows_of(folder) == [1, 2]


def test_a_row_that_was_cut_off_by_a_full_disk_is_written_whole_at_the_end(tmp_path: Path) -> None:
    with make(tmp_path) as recorder:
        recorder.log(1, {"train/reward": 0.5})
        recorder.log(2, {"train/reward": 0.5})
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(path.read_bytes()[:-5])
    assert rows_of(tmp_path) == [1, 2]


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_a_report_that_cannot_be_written_is_told_in_a_line_and_hides_no_error(
    error: type[BaseException] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        with make(tmp_path) as recorder:
            recorder.log(1, {"train/reward": 0.5})
            (tmp_path / "curves.png").symlink_to("/dev/full")
            if error is not None:
                raise error

    with pytest.raises(error or FolderError) as caught:
        run()
    told = f"logger.log_dir: {tmp_path} cannot be written to: No space left on device ("
    where = str(caught.value) if error is None else capsys.readouterr().err
    assert where.startswith(told)
    assert rows_of(tmp_path) == [1]


def test_a_second_ctrl_c_does_not_lose_the_report(tmp_path: Path) -> None:
    class Twice(io.StringIO):
        def write(self, text: str) -> int:
            signal.raise_signal(signal.SIGINT)
            return super().write(text)

    def run(recorder: RunRecorder) -> None:
        with recorder:
            recorder.log(1, {"train/reward": 0.5})
            recorder._console.file = Twice()
            raise KeyboardInterrupt

    with stop_signals(), pytest.raises(KeyboardInterrupt):
        run(make(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "curves.png"}


def test_the_events_of_tensorboard_are_among_the_files_that_are_named(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    with RunRecorder(
        LoggerConfig(log_dir=str(tmp_path), tensorboard_enabled=True), 1, console=console
    ) as recorder:
        recorder.log(1, {"train/reward": 0.5})
    assert f"{tmp_path / 'tensorboard'}\n" in console.file.getvalue()  # type: ignore[attr-defined]


class Gone(io.StringIO):
    """A console that nobody sees any more: what is written to it fails."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.tried = 0

    def write(self, text: str) -> int:
        self.tried += 1
        raise OSError(self.number, os.strerror(self.number))

    def isatty(self) -> bool:
        return self.number == errno.EIO


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO])
def test_a_console_that_is_gone_loses_nothing_and_is_no_error_of_the_folder(
    number: int, error: type[BaseException] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """EPIPE of a pipe whose reader has ended, where rich would end the process; EIO of a terminal that was closed."""
    stream = Gone(number)

    def run() -> None:
        with RunRecorder(LoggerConfig(log_dir=str(tmp_path)), 10, console=Console(file=stream)) as recorder:
            for step in (1, 2):
                recorder.log(step, {"train/reward": 0.5})
            recorder.add_samples([Sample(1, "1>", "1", "1", 1.0, True)])
            if error is not None:
                raise error

    with pytest.raises(error) if error else nullcontext():
        run()
    assert rows_of(tmp_path) == [1, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "curves.png", "samples.jsonl"}
    assert stream.tried == 1
    assert capsys.readouterr().err == ""
