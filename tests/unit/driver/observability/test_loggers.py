"""What no service may do to a run, and what TensorBoard is given; the others: test_services.py."""

import io
import json
import math
import threading
import time
from contextlib import contextmanager

import pytest
import yaml
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from written_samples import sample

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability import RunFacts, RunRecorder, loggers
from nemo_rl_mcore.driver.observability.loggers import TensorBoardLogger, kept_run_id, tables_of


class FakeService:
    """A logger that fails, or hangs, at one of its calls."""

    where = "https://service/run"

    def __init__(self, fails_at="", *, hangs=False):
        self.fails_at, self.hangs = fails_at, hangs
        self.calls: list[object] = []
        self.abandoned = threading.Event()

    def open(self):
        self._called("open")

    def log(self, step, metrics, tables):
        self._called("log", step, metrics["train/reward"], [*tables])

    def finish(self, exit_status):
        self._called("finish", exit_status)

    def abandon(self):
        self.abandoned.set()

    def _called(self, name, *what):
        if name == self.fails_at:
            if self.hangs:
                self.abandoned.wait(20)
                return
            raise ConnectionError("https://me:secret@service/api is not there\nand a long trace")
        self.calls.append((name, *what))


@contextmanager
def recorded(tmp_path, monkeypatch, services, **config):
    monkeypatch.setattr(loggers, "_asked_for", lambda _config, _run: services.items())
    console = Console(file=io.StringIO(), width=200)
    with RunRecorder(LoggerConfig(log_dir=str(tmp_path), **config), 10, console=console) as recorder:  # type: ignore[arg-type]
        yield recorder


def run_of_three(tmp_path, monkeypatch, *services, **config):
    """Log three steps; returns what was told of the services."""
    named = {f"service {number}": service for number, service in enumerate(services)}
    with recorded(tmp_path, monkeypatch, named, **config) as recorder:
        for step in (1, 2, 3):
            recorder.add_samples([sample(step), sample(step, of_validation=True)])
            recorder.log(step, {"train/reward": step / 4})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/reward"] for row in rows] == [0.25, 0.5, 0.75]
    return [line for line in recorder._console.file.getvalue().splitlines() if "service" in line]  # type: ignore[attr-defined]


def test_loggers_get_each_step_with_its_answers_and_the_end(tmp_path, monkeypatch):
    service = FakeService()
    monkeypatch.setattr(loggers, "TABLE_PERIOD", 2)
    told = run_of_three(tmp_path, monkeypatch, service)
    assert service.calls == [
        ("open",),
        ("log", 1, 0.25, ["validation/samples"]),
        ("log", 2, 0.5, ["train/samples", "validation/samples"]),
        ("log", 3, 0.75, ["validation/samples"]),
        ("finish", 0),
    ]
    assert told == ["service 0: https://service/run", "https://service/run"]


@pytest.mark.parametrize(("fails_at", "calls"), [("open", 0), ("log", 1), ("finish", 4)])
@pytest.mark.parametrize("hangs", [False, True])
def test_one_that_fails_is_told_once_and_hurts_nobody(fails_at, calls, hangs, tmp_path, monkeypatch):
    bad, good = FakeService(fails_at, hangs=hangs), FakeService()
    began = time.perf_counter()
    monkeypatch.setattr(loggers, "CALL_S", 0.3)
    told = run_of_three(tmp_path, monkeypatch, bad, good)
    assert time.perf_counter() - began < 10
    failures = [line for line in told if "fails" in line]
    reason = "no answer within 0.3 s" if hangs else "https://***@service/api is not there"
    assert failures == [
        f"service 0 fails: {reason}; the run goes on without it, and metrics.jsonl has every step"
    ]
    assert len(bad.calls) == calls
    assert bad.abandoned.is_set()
    assert len(good.calls) == 5
    assert told.count("https://service/run") == 1, "the place of the one that is whole"


@pytest.mark.parametrize(("error", "status"), [(RuntimeError, 1), (KeyboardInterrupt, 130)])
def test_loggers_are_told_how_a_run_ends(error, status, tmp_path, monkeypatch):
    service = FakeService()

    def run():
        with recorded(tmp_path, monkeypatch, {"service": service}) as recorder:
            recorder.add_samples([sample()])
            raise error

    with pytest.raises(error):
        run()
    assert service.calls == [("open",), ("finish", status)]


def test_tables_have_the_first_answer_of_each_prompt_and_so_many_rows():
    trained = [sample(1, index, prompt=prompt) for prompt in "abc" for index in range(2)]
    judged = [sample(1, prompt="v\ud800", of_validation=True)]
    train, validation = tables_of(trained + judged, 2, of_training=True).values()
    prompt = loggers.SAMPLE_COLUMNS.index("prompt")
    assert [row[prompt] for row in train] == ["a", "b"]
    assert [row[prompt] for row in validation] == ["v\\ud800"]
    assert tables_of(trained, 2, of_training=False) == {}
    assert tables_of(trained + judged, 0, of_training=True) == {}


def test_a_run_keeps_its_id_only_when_it_goes_on(tmp_path):
    file = tmp_path / "id"
    assert kept_run_id(file, 3) is None
    file.write_text("abc1")
    assert kept_run_id(file, 3) == "abc1"
    assert kept_run_id(file, None) is None
    file.write_bytes(b"\xff/../")
    assert kept_run_id(file, 3) is None


def tensorboard(tmp_path, resumed_step=None, **config):
    given = LoggerConfig(log_dir=str(tmp_path), **config)  # type: ignore[arg-type]
    logger = TensorBoardLogger(given, RunFacts("grpo", {"a": {"b": "x"}}, resumed_step))
    logger.open()
    return logger


def read(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def text_at(events, tag, step):
    (event,) = [event for event in events.Tensors(tag) if event.step == step]
    return event.tensor_proto.string_val[0].decode()


def test_tensorboard_has_scalars_recipe_and_answers_on_disk_at_once(tmp_path):
    logger = tensorboard(tmp_path)
    answers = [sample(2, response="``` *not* \n# Markdown ä\ud800", of_validation=True)]
    for step in (1, 2):
        tables = tables_of(answers, 4, of_training=True) if step == 2 else {}
        logger.log(step, {"train/reward": step / 4, "train/loss": math.nan}, tables)
    events = read(tmp_path / "tensorboard")
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [(1, 0.25), (2, 0.5)]
    assert yaml.safe_load(text_at(events, "recipe", 0)) == {"a": {"b": "x"}}
    shown = text_at(events, "validation/samples", 2)
    assert all(line.startswith("    ") for line in shown.splitlines()), "shown as it is"
    (row,) = yaml.safe_load(shown)
    assert row["response"] == "``` *not* \n# Markdown ä\\ud800"
    assert row["reward"] == 1.0
    assert events.SummaryMetadata("recipe").plugin_data.plugin_name == "text"
    logger.finish(0)


def test_tensorboard_drops_what_a_resumed_run_writes_anew(tmp_path):
    for resumed_step, steps in ((None, (1, 2, 3)), (1, (2,))):
        logger = tensorboard(tmp_path, resumed_step)
        for step in steps:
            logger.log(step, {"train/reward": step if resumed_step is None else 9.0}, {})
        logger.finish(0)
    events = read(tmp_path / "tensorboard")
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [(1, 1.0), (2, 9.0)]


def test_a_full_disk_is_an_error_of_tensorboards_step(tmp_path):
    logger = tensorboard(tmp_path)
    logger._file.close()
    logger._file = logger._records._writer = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match="No space"):
        logger.log(1, {"train/reward": 0.5}, {})
    logger.finish(1)
