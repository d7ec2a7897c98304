import json
import math
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.observability import sinks
from nemo_rl_mcore.observability.sinks import JsonlSink, TensorBoardSink, open_sinks


def test_jsonl_has_one_object_a_step_on_disk_at_once(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "run" / "a")
    path = tmp_path / "run" / "a" / "metrics.jsonl"
    sink.log(1, {"train/reward": 0.5})
    assert path.read_text() == '{"step": 1, "train/reward": 0.5}\n'
    sink.log(2, {"train/reward": 0.25, "train/loss": -1})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    sink.close()
    sink.close()


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.0})
    sink.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "a": None, "b": None, "c": None, "d": 0.0}


def test_an_earlier_run_is_kept_aside(tmp_path: Path) -> None:
    for run in (1, 2, 3):
        sink = JsonlSink(tmp_path)
        sink.log(run, {})
        sink.close()
    steps = {path.name: json.loads(path.read_text())["step"] for path in tmp_path.iterdir()}
    assert steps == {"metrics.1.jsonl": 1, "metrics.2.jsonl": 2, "metrics.jsonl": 3}


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_goes_on_with_the_file_and_keeps_later_rows_aside(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    for step in (0, 1, 2, 3):
        sink.log(step, {"a": step})
    sink.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "a"')  # the process died here
    for _ in range(2):
        sink = JsonlSink(tmp_path, resumed_step=2)
        sink.log(3, {"a": 7})
        sink.close()
        assert rows(tmp_path / "metrics.jsonl") == [
            {"step": s, "a": a} for s, a in ((0, 0), (1, 1), (2, 2), (3, 7))
        ]
    assert (tmp_path / "metrics.1.jsonl").read_text() == '{"step": 3, "a": 3}\n{"step": 4, "a"'
    assert rows(tmp_path / "metrics.2.jsonl") == [{"step": 3, "a": 7}]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_resumed_run_with_nothing_to_put_aside_only_goes_on(tmp_path: Path) -> None:
    for step in (1, 2):
        sink = JsonlSink(tmp_path, resumed_step=step - 1)
        sink.log(step, {})
        sink.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_tensorboard_events_can_be_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step in (1, 2):
        sink.log(step, {"train/reward": step / 4, "train/loss": math.nan})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [(1, 0.25), (2, 0.5)]


def test_tensorboard_drops_what_a_resumed_run_writes_anew(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed_step, steps in ((None, (1, 2, 3)), (1, (2,))):
        sink = TensorBoardSink(tmp_path, resumed_step)
        for step in steps:
            sink.log(step, {"train/reward": step if resumed_step is None else 9.0})
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [(1, 1.0), (2, 9.0)]


def test_the_config_chooses_the_sinks(tmp_path: Path) -> None:
    only_file = open_sinks(LoggerConfig(log_dir=str(tmp_path / "a")))
    both = open_sinks(LoggerConfig(log_dir=str(tmp_path / "b"), tensorboard_enabled=True))
    assert [type(sink) for sink in only_file] == [JsonlSink]
    assert [type(sink) for sink in both] == [JsonlSink, TensorBoardSink]
    for sink in [*only_file, *both]:
        sink.close()


def test_wandb_without_the_package_names_key_and_extra_and_closes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    closed: list[Path] = []

    class Watched(JsonlSink):
        def __init__(self, log_dir: Path, resumed_step: int | None = None) -> None:
            super().__init__(log_dir, resumed_step)
            self.log_dir = log_dir

        def close(self) -> None:
            super().close()
            closed.append(self.log_dir)

    monkeypatch.setattr(sinks, "JsonlSink", Watched)
    with pytest.raises(ValueError, match=r"logger\.wandb_enabled: .* `uv sync --extra wandb`"):
        open_sinks(LoggerConfig(log_dir=str(tmp_path), wandb_enabled=True))
    assert closed == [tmp_path]


def test_tensorboard_events_are_on_disk_at_once_and_a_full_disk_is_an_error_there(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.log(1, {"train/reward": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [(1, 0.5)]
    sink._file.close()
    sink._file = sink._records._writer = open("/dev/full", "wb")  # noqa: SIM115
    with pytest.raises(OSError, match="No space left on device"):
        sink.log(2, {"train/reward": 0.5})
    with suppress(OSError):
        sink.close()
