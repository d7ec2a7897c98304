import errno
import io
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console
from written_samples import sample

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability import RunFacts, RunRecorder, read_rollouts
from nemo_rl_mcore.driver.output import open_console
from nemo_rl_mcore.driver.signals import stop_signals
from nemo_rl_mcore.errors import FolderError


def make(
    log_dir: Path, resumed_step: int | None = None, write_page: Callable[[Path], object] | None = None
) -> RunRecorder:
    console, run = Console(file=io.StringIO(), width=100), RunFacts(resumed_step=resumed_step)
    return RunRecorder(
        LoggerConfig(log_dir=str(log_dir)), 10, console=console, run=run, write_page=write_page
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes while somebody sleeps, and nowhere else."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)


def on_a_full_disk(folder: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def test_a_run_that_others_tell_of_ends_without_a_summary(tmp_path):
    stream = io.StringIO()
    config, console = LoggerConfig(log_dir=str(tmp_path)), Console(file=stream)
    with RunRecorder(config, 1, console=console, summary=False) as recorder:
        recorder.log(1, {"train/reward": 0.5})
    assert "train/reward" not in stream.getvalue()
    assert (tmp_path / "metrics.jsonl").is_file()


@pytest.mark.usefixtures("clock")
def test_a_step_gets_its_times_and_its_token_rate(tmp_path: Path) -> None:
    with make(tmp_path) as recorder:
        for step in (1, 2):
            with recorder.phase("train"):
                time.sleep(0.05)
            recorder.log(step, {"train/reward": 0.5, "train/total_num_tokens": 100.0})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["timing/train"] == row["timing/total"] == pytest.approx(0.05)
        assert row["performance/tokens_per_sec"] == pytest.approx(100 / row["timing/total"])
        assert row["train/reward"] == 0.5


def test_the_answers_of_a_step_are_there_before_its_row_and_outlive_a_row_that_cannot_be_written(
    tmp_path: Path,
) -> None:
    def run() -> None:
        with make(tmp_path) as recorder:
            for step in (1, 2):
                recorder.add_samples([sample(step)])
                if step == 2:
                    (tmp_path / "metrics.jsonl").unlink()
                recorder.log(step, {"train/reward": 0.5})

    with pytest.raises(FolderError):
        run()
    assert [next(read_rollouts(tmp_path / f"rollouts/step_{step}.jsonl.gz"))["step"] for step in (1, 2)] == [
        1,
        2,
    ]
    assert rows_of(tmp_path) == [1, 2], "written again at the end"


def test_answers_that_cannot_be_written_are_an_error_of_the_folder_and_the_row_is_kept(
    tmp_path: Path,
) -> None:
    def run() -> None:
        with make(tmp_path) as recorder:
            recorder.add_samples([sample()])
            (tmp_path / "rollouts").write_text("no folder")
            recorder.log(1, {"train/reward": 0.5})

    with pytest.raises(FolderError, match=rf"^logger\.log_dir: {tmp_path}"):
        run()
    assert rows_of(tmp_path) == [1]


def test_only_the_newest_samples_one_a_prompt_are_shown(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    config = LoggerConfig(log_dir=str(tmp_path), num_val_samples_to_print=2)
    with RunRecorder(config, 1, console=console) as recorder:
        recorder.add_samples(
            sample(1, index, response=f"{prompt}-{index}") for prompt in "abc" for index in range(2)
        )
        recorder.log(1, {"train/reward": 0.5})
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert [answer in shown for answer in ("a-0", "b-0", "c-0", "c-1")] == [False, True, True, False]


@pytest.mark.usefixtures("clock")
def test_the_start_is_told_part_by_part_and_is_no_time_of_the_first_step(tmp_path: Path) -> None:
    recorder = make(tmp_path)
    with recorder.startup("policy", "starting 2 ranks of the policy") as pieces:
        time.sleep(0.2)
        pieces["policy_loading_weights"] = 0.125
    with recorder:
        with recorder.phase("startup/weights"):
            with recorder.startup("engines", "starting 1 vLLM engine"):
                time.sleep(0.2)
            time.sleep(0.1)
        for step in (1, 2):
            with recorder.phase("train"):
                pass
            recorder.log(step, {"train/reward": 0.5})
    told = recorder._console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert told[:3] == [
        "starting 2 ranks of the policy ... 0.2 s (policy loading weights 0.1 s)",
        "starting 1 vLLM engine ... 0.2 s",
        "sending the weights to the engines ... 0.1 s",
    ]
    first, second = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    start = {name.removeprefix("timing/startup/"): s for name, s in first.items() if "startup" in name}
    wanted = {"policy": 0.2, "policy_loading_weights": 0.125, "engines": 0.2, "weights": 0.1}
    assert start == pytest.approx(wanted), "each second counts once"
    assert first["timing/total"] == 0.0
    assert not [name for name in second if "startup" in name]
    assert "startup" not in "".join(told[3:])


def test_engines_that_start_anew_are_a_part_of_their_step(tmp_path: Path) -> None:
    recorder = make(tmp_path)
    with recorder:
        with recorder.phase("train"), recorder.startup("engines", "starting 1 engine"):
            time.sleep(0.05)
        recorder.log(1, {"train/reward": 0.5})
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["timing/total"] >= 0.05
    assert "timing/startup/engines" not in row
    assert "starting" not in recorder._console.file.getvalue()  # type: ignore[attr-defined]


def test_the_report_of_a_resumed_run_is_about_the_whole_run(tmp_path: Path) -> None:
    for resumed_step, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        recorder = make(tmp_path, resumed_step)
        with recorder:
            for step in steps:
                recorder.log(step, {"train/reward": 0.5})
    output = recorder._console.file.getvalue()  # type: ignore[attr-defined]
    assert rows_of(tmp_path) == [1, 2, 3, 4]
    assert "step 3/10" in output, "the first line of the resumed run"


def rows_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("lost", ["before a step", "behind the last step", "half of a row"])
def test_every_row_that_is_lost_is_written_anew_at_the_end(lost: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def run() -> None:
        with make(folder) as recorder:
            for step in (1, 2, 3):
                if step == 3 and lost == "before a step":
                    shutil.rmtree(folder)
                recorder.log(step, {"train/reward": 0.5})
            if lost == "behind the last step":
                shutil.rmtree(folder)
            elif lost == "half of a row":
                path = folder / "metrics.jsonl"
                path.write_bytes(path.read_bytes()[:-5])

    ends = lost == "before a step"
    with pytest.raises(FolderError, match=rf"^logger\.log_dir: {folder} .*gone") if ends else nullcontext():
        run()
    assert rows_of(folder) == [1, 2, 3]
    assert {path.name for path in folder.iterdir()} == {"metrics.jsonl"}


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_a_report_that_cannot_be_written_is_told_in_a_line_and_hides_no_error(
    error: type[BaseException] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        with make(tmp_path, write_page=on_a_full_disk) as recorder:
            recorder.log(1, {"train/reward": 0.5})
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
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}


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
        with RunRecorder(LoggerConfig(log_dir=str(tmp_path)), 10, console=open_console(stream)) as recorder:
            recorder.add_samples([sample()])
            for step in (1, 2):
                recorder.log(step, {"train/reward": 0.5})
            if error is not None:
                raise error

    with pytest.raises(error) if error else nullcontext():
        run()
    assert rows_of(tmp_path) == [1, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "rollouts"}
    assert stream.tried == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("rows", [0, 1])
def test_the_page_is_written_once_there_are_rows(rows: int, tmp_path: Path) -> None:
    written: list[list[int]] = []
    config = LoggerConfig(log_dir=str(tmp_path))
    with RunRecorder(
        config,
        1,
        console=Console(file=io.StringIO()),
        write_page=lambda folder: written.append(rows_of(folder)),
    ) as recorder:
        for step in range(1, rows + 1):
            recorder.log(step, {"train/reward": 0.5})
    assert written == [[1]] * rows


def test_phases_have_wall_and_cpu_seconds_are_added_and_counted_where_they_raise(tmp_path: Path) -> None:
    def work() -> None:
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass
        raise KeyError

    with make(tmp_path) as recorder:
        for _ in range(2):
            with recorder.phase("sleep"):
                time.sleep(0.05)
        with pytest.raises(KeyError), recorder.phase("work"):
            work()
        recorder.log(1, {})
        recorder.log(2, {})
    first, second = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {*first} == {
        "step",
        *(f"timing/{name}" for name in ("sleep", "sleep_cpu", "work", "work_cpu", "total")),
    }
    assert first["timing/sleep"] >= 0.1 > 0.05 > first["timing/sleep_cpu"]
    assert 0.1 <= first["timing/work_cpu"] < 0.2
    assert {*second} == {"step", "timing/total"}
