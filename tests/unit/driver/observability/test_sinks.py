import json
import math
from pathlib import Path

from refusals import refused

from nemo_rl_mcore.driver.observability.sinks import JsonlSink, read_history


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


def test_a_cut_last_line_is_left_out_and_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 2}\n{"step": 2, "a"')
    assert read_history(tmp_path) == [{"step": 1.0, "a": 2.0}]
    path.write_text('{"step": 1}\n[1, 2]\n')
    with refused("broken-row", "metrics.jsonl:2 "):
        read_history(tmp_path)


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with refused("no-run", tmp_path / "nowhere/metrics.jsonl", "logger.log_dir"):
        read_history(tmp_path / "nowhere")
