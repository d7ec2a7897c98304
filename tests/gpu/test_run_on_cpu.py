"""The GPU run's own code, on CPU: every part at tiny sizes, and what becomes of a part that fails or hangs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from costs import cost_row
from fused_linear_logprobs import Problem
from report import Report
from run import DEADLINES_S
from table import is_ok, markdown
from worker_part import TOLERANCES

HERE = Path(__file__).parent
# What the machine of a GPU run need not have.
NOT_NEEDED = (
    *("ray", "vllm", "transformers", "tokenizers", "huggingface_hub", "hydra", "tensorboard", "matplotlib"),
    *("rich", "psutil", "wandb", "pytest", "hypothesis"),
)


def run_script(folder, *arguments):
    """run.sh in a process whose interpreter lacks those packages: the finished process, and the parts' findings."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({NOT_NEEDED!r})\n")
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
    assert found.keys() == {"kernels", "worker", "refit"}
    assert all(is_ok(content) for content in found.values())
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
    assert sum(DEADLINES_S.values()) < 600
