"""Weights & Biases for real, offline: what is written is read back from its file. No service has ever been called."""

import gc
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from wandb_file import config_of, exit_code_of, records, rows_of, run_of
from written_samples import sample

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability import RunFacts, RunRecorder

pytestmark = [
    pytest.mark.needs("wandb"),
    pytest.mark.exhaustive,
    # Of temporary folders that wandb leaves to the end of the process.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
RECIPE = {"grpo": {"max_num_steps": 3, "lr": 1e-6}, "policy": {"model_name": None}}


@pytest.fixture(autouse=True)
def _no_key(monkeypatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    gc.collect()  # here, where what wandb leaves is no error


def recorder(log_dir: Path, resumed_step: int | None = None, recipe=RECIPE, **wandb: object) -> RunRecorder:
    section = {"project": "p", "name": "n", **wandb}
    config = LoggerConfig(log_dir=str(log_dir), wandb_enabled=True, wandb=section)  # type: ignore[arg-type]
    console = Console(file=io.StringIO(), width=200)
    return RunRecorder(config, 10, console=console, run=RunFacts("grpo", recipe, resumed_step))


def told(run: RunRecorder) -> str:
    return run._console.file.getvalue()  # type: ignore[attr-defined]


def runs(log_dir: Path) -> list[Path]:
    return sorted(log_dir.glob("wandb/offline-run-*"), key=lambda folder: folder.stat().st_mtime_ns)


def services() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.name() == "wandb-core"]


def test_recipe_metrics_answers_and_the_end_are_there(tmp_path, monkeypatch) -> None:
    for name, value in {"ENTITY": "e", "RUN_GROUP": "g", "TAGS": "a,b", "NOTES": "why"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    with recorder(tmp_path) as run:
        for step in (0, 1, 2):
            run.add_samples([sample(step, response="r\ud800", of_validation=True)])
            run.log(step, {"train/reward": step / 4, "odd": math.nan, "train/total_num_tokens": 8.0})
    (folder,) = runs(tmp_path)
    filed = run_of(folder)
    assert (filed.project, filed.display_name, filed.entity) == ("p", "n", "e")
    assert (filed.run_group, list(filed.tags), filed.notes, filed.job_type) == (
        "g",
        ["a", "b"],
        "why",
        "grpo",
    )
    assert config_of(folder) | RECIPE == config_of(folder)
    rows = rows_of(folder)
    assert [(row["step"], row["train/reward"]) for row in rows] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert rows[1]["odd"] == "NaN" or math.isnan(rows[1]["odd"])
    metrics = [record.metric for record in records(folder) if record.HasField("metric")]
    assert ("*", "step") in [(metric.glob_name, metric.step_metric) for metric in metrics]
    for step, row in enumerate(rows):
        table = json.loads((folder / "files" / row["validation/samples/path"]).read_text("utf-8"))
        (shown,) = [dict(zip(table["columns"], values, strict=True)) for values in table["data"]]
        assert (shown["step"], shown["prompt"], shown["response"]) == (step, "1>", "r\\ud800")
    assert exit_code_of(folder) == 0
    assert services() == []
    assert f"wandb sync {folder}\n" in told(run)


OUTLIVES_WANDB = """
import sys
import psutil
from rich.console import Console
from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability import RunRecorder, loggers

loggers.CALL_S = 10.0

def services():
    return [child for child in psutil.Process().children() if child.name() == "wandb-core"]

folder, number = sys.argv[1:]
config = LoggerConfig(log_dir=folder, wandb_enabled=True, wandb={"project": "p"})
wide = {f"train/{name}": 0.5 for name in range(300)}
with RunRecorder(config, 10, console=Console(width=300)) as run:
    run.log(1, wide)
    for service in services():
        service.send_signal(int(number))
    for step in range(2, 100):
        run.log(step, wide)
assert services() == []
"""


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        ("offline", 9),
        ("offline", 19),
        ("online", 0),
    ],
)
@pytest.mark.stage("processes")
def test_a_wandb_that_dies_or_hangs_or_is_not_there_is_told_and_left_behind(mode, number, tmp_path) -> None:
    """In a process of its own, whose end wandb would hold up. 9: killed; 19: stopped; online: nobody answers."""
    command = [sys.executable, "-c", OUTLIVES_WANDB, str(tmp_path), str(number)]
    nobody = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "k" * 40, "WANDB_MODE": mode}
    ended = subprocess.run(
        command, env=os.environ | nobody, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    (line,) = [line for line in ended.stdout.splitlines() if " fails: " in line]
    assert line.startswith("Weights & Biases fails: ")
    assert line.endswith("; the run goes on without it, and metrics.jsonl has every step")
    assert "k" * 40 not in ended.stdout
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 99
    assert "wandb sync" not in ended.stdout.splitlines()[-1]
