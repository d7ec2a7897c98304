import errno
import io
import json
import math
import os
import shutil
import signal
import time
from contextlib import nullcontext

import pytest
from rich.console import Console
from written_samples import sample

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability import RunFacts, RunRecorder, read_rollouts
from nemo_rl_mcore.driver.observability.recorder import Best, ProgressDisplay, best_of
from nemo_rl_mcore.driver.output import open_console
from nemo_rl_mcore.driver.signals import stop_signals
from nemo_rl_mcore.errors import FolderError


def make(log_dir, resumed_step=None, console=None, write_page=None, summary=True, **config):
    console, run = console or Console(file=io.StringIO(), width=100), RunFacts(resumed_step=resumed_step)
    section, options = (
        LoggerConfig(log_dir=str(log_dir), **config),
        {"write_page": write_page, "summary": summary},
    )
    return RunRecorder(section, 10, console=console, run=run, **options)


def told(recorder):
    return recorder._console.file.getvalue()


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder):
    return [row["step"] for row in rows_of(folder)]


@pytest.fixture
def clock(monkeypatch):
    """Time passes while somebody sleeps, and nowhere else."""
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)


def on_a_full_disk(folder):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def test_a_run_that_others_tell_of_ends_without_a_summary(tmp_path):
    with make(tmp_path, summary=False) as recorder:
        recorder.log(1, {"train/reward": 0.5})
    assert "train/reward" not in told(recorder)
    assert (tmp_path / "metrics.jsonl").is_file()


@pytest.mark.usefixtures("clock")
def test_a_step_gets_its_times_and_its_token_rate(tmp_path):
    with make(tmp_path) as recorder:
        for step in (1, 2):
            with recorder.phase("train"):
                time.sleep(0.05)
            recorder.log(step, {"train/reward": 0.5, "train/total_num_tokens": 100.0})
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["timing/train"] == row["timing/total"] == pytest.approx(0.05)
        assert row["performance/tokens_per_sec"] == pytest.approx(100 / row["timing/total"])
        assert row["train/reward"] == 0.5


def test_the_answers_of_a_step_are_there_before_its_row_and_outlive_a_row_that_cannot_be_written(tmp_path):
    def run():
        with make(tmp_path) as recorder:
            for step in (1, 2):
                recorder.add_samples([sample(step)])
                if step == 2:
                    (tmp_path / "metrics.jsonl").unlink()
                recorder.log(step, {"train/reward": 0.5})

    with pytest.raises(FolderError):
        run()
    for step in (1, 2):
        assert next(read_rollouts(tmp_path / f"rollouts/step_{step}.jsonl.gz"))["step"] == step
    assert steps_of(tmp_path) == [1, 2], "written again at the end"


def test_answers_that_cannot_be_written_are_an_error_of_the_folder_and_the_row_is_kept(tmp_path):
    def run():
        with make(tmp_path) as recorder:
            recorder.add_samples([sample()])
            (tmp_path / "rollouts").write_text("no folder")
            recorder.log(1, {"train/reward": 0.5})

    with pytest.raises(FolderError, match=rf"^logger\.log_dir: {tmp_path}"):
        run()
    assert steps_of(tmp_path) == [1]


def test_only_the_newest_samples_one_a_prompt_are_shown(tmp_path):
    with make(tmp_path, num_val_samples_to_print=2) as recorder:
        recorder.add_samples(
            sample(1, index, response=f"[red]\ud800{prompt}-{index}")
            for prompt in "abc"
            for index in range(2)
        )
        recorder.log(1, {"train/reward": 0.5})
    shown = told(recorder)
    answers = ("a-0", "b-0", "c-0", "c-1")
    assert [one for one in answers if f"[red]\\ud800{one}" in shown] == ["b-0", "c-0"], "as it was answered"


@pytest.mark.usefixtures("clock")
def test_the_start_is_told_part_by_part_and_is_no_time_of_the_first_step(tmp_path):
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
    lines = told(recorder).splitlines()  # type: ignore[attr-defined]
    assert lines[:3] == [
        "starting 2 ranks of the policy ... 0.2 s (policy loading weights 0.1 s)",
        "starting 1 vLLM engine ... 0.2 s",
        "sending the weights to the engines ... 0.1 s",
    ]
    first, second = rows_of(tmp_path)
    start = {name.removeprefix("timing/startup/"): s for name, s in first.items() if "startup" in name}
    wanted = {"policy": 0.2, "policy_loading_weights": 0.125, "engines": 0.2, "weights": 0.1}
    assert start == pytest.approx(wanted), "each second counts once"
    assert first["timing/total"] == 0.0
    assert not [name for name in second if "startup" in name]
    assert "startup" not in "".join(lines[3:])


def test_engines_that_start_anew_are_a_part_of_their_step(tmp_path):
    recorder = make(tmp_path)
    with recorder:
        with recorder.phase("train"), recorder.startup("engines", "starting 1 engine"):
            time.sleep(0.05)
        recorder.log(1, {"train/reward": 0.5})
    (row,) = rows_of(tmp_path)
    assert row["timing/total"] >= 0.05
    assert "timing/startup/engines" not in row
    assert "starting" not in told(recorder)


def test_the_report_of_a_resumed_run_is_about_the_whole_run(tmp_path):
    for resumed_step, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        recorder = make(tmp_path, resumed_step)
        with recorder:
            for step in steps:
                recorder.log(step, {"train/reward": 0.5})
    output = told(recorder)
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    assert "step 3/10" in output, "the first line of the resumed run"


@pytest.mark.parametrize("lost", ["before a step", "behind the last step", "half of a row"])
def test_every_row_that_is_lost_is_written_anew_at_the_end(lost, tmp_path):
    folder = tmp_path / "run"

    def run():
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
    assert steps_of(folder) == [1, 2, 3]
    assert {path.name for path in folder.iterdir()} == {"metrics.jsonl"}


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_a_report_that_cannot_be_written_is_told_in_a_line_and_hides_no_error(error, tmp_path, capsys):
    def run():
        with make(tmp_path, write_page=on_a_full_disk) as recorder:
            recorder.log(1, {"train/reward": 0.5})
            if error is not None:
                raise error

    with pytest.raises(error or FolderError) as caught:
        run()
    told = f"logger.log_dir: {tmp_path} cannot be written to: No space left on device ("
    where = str(caught.value) if error is None else capsys.readouterr().err
    assert where.startswith(told)
    assert steps_of(tmp_path) == [1]


def test_a_second_ctrl_c_does_not_lose_the_report(tmp_path):
    class Twice(io.StringIO):
        def write(self, text):
            signal.raise_signal(signal.SIGINT)
            return super().write(text)

    def run(recorder):
        with recorder:
            recorder.log(1, {"train/reward": 0.5})
            recorder._console.file = Twice()
            raise KeyboardInterrupt

    with stop_signals(), pytest.raises(KeyboardInterrupt):
        run(make(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}


class Gone(io.StringIO):
    """A console that nobody sees any more: what is written to it fails."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.tried = 0

    def write(self, text):
        self.tried += 1
        raise OSError(self.number, os.strerror(self.number))

    def isatty(self):
        return self.number == errno.EIO


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO])
def test_a_console_that_is_gone_loses_nothing_and_is_no_error_of_the_folder(number, error, tmp_path, capsys):
    """EPIPE of a pipe whose reader has ended, where rich would end the process; EIO of a terminal that was closed."""
    stream = Gone(number)

    def run():
        with make(tmp_path, console=open_console(stream)) as recorder:
            recorder.add_samples([sample()])
            for step in (1, 2):
                recorder.log(step, {"train/reward": 0.5})
            if error is not None:
                raise error

    with pytest.raises(error) if error else nullcontext():
        run()
    assert steps_of(tmp_path) == [1, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "rollouts"}
    assert stream.tried == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("rows", [0, 1])
def test_the_page_is_written_once_there_are_rows(rows, tmp_path):
    written = []
    with make(tmp_path, write_page=lambda folder: written.append(steps_of(folder))) as recorder:
        for step in range(1, rows + 1):
            recorder.log(step, {"train/reward": 0.5})
    assert written == [[1]] * rows


def test_phases_have_wall_and_cpu_seconds_are_added_and_counted_where_they_raise(tmp_path):
    def work():
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
    first, second = rows_of(tmp_path)
    assert {*first} == {
        "step",
        *(f"timing/{name}" for name in ("sleep", "sleep_cpu", "work", "work_cpu", "total")),
    }
    assert first["timing/sleep"] >= 0.1 > 0.05 > first["timing/sleep_cpu"]
    assert 0.1 <= first["timing/work_cpu"] < 0.2
    assert {*second} == {"step", "timing/total"}


# What a run shows of its steps


def shown(total=100, terminal=False, **options):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=120, legacy_windows=False, _environ={})
    return ProgressDisplay(total, console=console, **options), screen


def step_metrics(step):
    return {
        "train/reward": step / 100,
        "train/loss": -0.5,
        "train/grad_norm": 12.25,
        "performance/tokens_per_sec": 15000.4,
        "timing/generation": 0.25,
        "timing/generation_cpu": 0.2,
    }


def test_elsewhere_than_on_a_terminal_there_are_plain_lines_now_and_then():
    display, screen = shown(total=25, plain_every=10)
    for step in range(1, 26):
        display.log(step, step_metrics(step))
    lines = screen.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    assert lines[1] == (
        "step 10/25  reward 0.1  loss -0.5  gradient norm 12.25  tokens/s 15,000"
        "  generation 0.25 s  elapsed 0:00:00"
    )
    assert all(character.isprintable() for line in lines for character in line)


def test_a_terminal_shows_each_step_and_the_time_left():
    display, screen = shown(terminal=True, total=5, steps_before=2)
    for step in (3, 4, 5):
        display.log(step, step_metrics(step))
    lines = screen.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["3/5", "4/5", "5/5"]
    assert all("  left 0:00:0" in line for line in lines)


def test_a_validation_is_shown_with_its_best_value_also_from_before_a_resume():
    display, screen = shown(steps_before=2)
    display.take(1, {"validation/accuracy": 0.875, "validation/loss": 0.5})
    display.log(3, {"validation/accuracy": 0.5, "validation/loss": 0.25, "train/reward": math.nan})
    assert "  accuracy 0.5 (best 0.875 at step 1)  held-out loss 0.25  " in screen.getvalue()
    assert "reward nan" in screen.getvalue()


# What it shows at its end


@pytest.mark.parametrize(
    ("name", "best"),
    [("validation/accuracy", Best(250, 1.0)), ("validation/loss", Best(50, 0.0)), ("train/x", Best(50, 0.0))],
)
def test_the_best_value_is_the_highest_of_a_validation_but_for_losses(name, best):
    points = [Best(50, 0.0), Best(250, 1.0), Best(300, 0.75), Best(350, 1.0), Best(400, 0.0)]
    assert best_of(name, points) == best
