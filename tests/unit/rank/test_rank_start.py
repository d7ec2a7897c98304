"""How a rank starts: what CUDA reads before its first use, and where ranks meet, however late one of them is."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import nemo_rl_mcore
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.rank import accelerator, policy_backend
from nemo_rl_mcore.rank.rendezvous import listen_at
from nemo_rl_mcore.recipe.load import load_config

EXPERTS = ("+policy.model.num_moe_experts=4", "policy.precision=bfloat16")


@pytest.mark.parametrize(
    ("overrides", "environ", "expected"),
    [
        ((), {}, {}),
        (("policy.megatron_cfg.tensor_model_parallel_size=2",), {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (
            (
                "policy.megatron_cfg.context_parallel_size=2",
                "policy.megatron_cfg.use_fused_linear_logprobs=false",
            ),
            {},
            {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        ),
        (("policy.megatron_cfg.tensor_model_parallel_size=2",), {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {}),
        (
            (
                "policy.megatron_cfg.tensor_model_parallel_size=2",
                "policy.megatron_cfg.sequence_parallel=true",
                "+policy.megatron_cfg.expert_model_parallel_size=2",
                "+policy.megatron_cfg.overlap_moe_expert_parallel_comm=true",
                *EXPERTS,
            ),
            {},
            {},
        ),
    ],
    ids=["data", "tensor", "context", "own-value", "expert-overlap"],
)
def test_shared_layers_have_one_queue(overrides, environ, expected, monkeypatch):
    policy = load_config("examples/configs/grpo_copy_cpu.yaml", overrides).policy
    environ = dict(environ)
    before, opened = dict(environ), []
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(accelerator, "install", lambda local_rank: opened.append(dict(environ)))
    backend = SimpleNamespace(open_backend=lambda *_, alone: alone)
    monkeypatch.setattr(policy_backend, "import_module", lambda _: backend)
    assert policy_backend.open_backend(policy, None) is False
    assert opened == [before | expected], "they are set before the device is used"


ROOT = Path(__file__).parents[3]
LATE_S = 2.0
MEET = f"""
import os, sys, time
import torch, torch.distributed as dist
from nemo_rl_mcore.rank import rendezvous
from listening import listening_addresses

rank = int(os.environ["RANK"])
time.sleep({LATE_S} * rank)
rendezvous.join()
rendezvous.join()  # nothing more to do
group = dist.new_group()
everyone = torch.tensor([rank + 1])
dist.all_reduce(everyone, group=group)
dist.barrier(rendezvous.patient_group)
print(int(everyone), *listening_addresses())
dist.barrier()
rendezvous.leave()
assert not dist.is_initialized()
"""


def met(*, brings_a_socket):
    """What two ranks print; the first has the socket from its parent, or binds it itself."""
    listening = listen_at("127.0.0.1")
    port = listening.getsockname()[1]
    if not brings_a_socket:
        listening.close()
    named = {"MASTER_LISTEN_FD": str(listening.fileno())} if brings_a_socket else {}
    environment = os.environ | {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEET],
            env=environment | {"RANK": str(rank)} | ({} if rank else named),
            pass_fds=[] if rank or not brings_a_socket else [listening.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    listening.close()
    try:
        return [rank.communicate(timeout=90)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("brings_a_socket", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.stage("processes")
def test_ranks_meet_on_the_loopback_interface_alone_also_when_one_is_late(brings_a_socket):
    for total, *addresses in met(brings_a_socket=brings_a_socket):
        assert total == "3"
        assert addresses, "gloo listens"
        assert set(addresses) == {"127.0.0.1"}


def test_an_address_of_another_machine_is_named():
    with pytest.raises(RunStoppedError, match=r"cannot listen at MASTER_ADDR=192\.0\.2\.7, port 4711"):
        listen_at("192.0.2.7", 4711)


# What stands in for CUDA; each test in a process, since installing is for good


INSTALL = "from nemo_rl_mcore.rank import accelerator; accelerator.install()\n"


def printed(code):
    """The JSON that a program prints last, on a machine without a GPU."""
    run = [sys.executable, "-c", code]
    without_gpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    output = subprocess.run(run, env=without_gpu, capture_output=True, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])


DEVICES = """
import json, torch
made = {}
def constructors():
    yield torch.empty(3)
    yield torch.zeros(3)
    yield torch.arange(3)
    yield torch.full((3,), 1.0)
    yield torch.tensor([1.0])
    yield torch.randn(3)
    yield torch.empty(3, device="cpu")
    yield torch.nn.Linear(2, 2).weight
    yield torch.nn.Linear(2, 2, device="cuda").weight
for name in ("meta", "cuda", "cuda:0", "cpu"):
    with torch.device(name):
        made[name] = [tensor.device.type for tensor in constructors()]
torch.set_default_device("meta")
made["default"] = [tensor.device.type for tensor in constructors()]
torch.set_default_device(None)
made["none"] = [torch.empty(3).device.type, torch.empty(3, device="meta").device.type]
print(json.dumps(made))
"""


@pytest.mark.parametrize("before", ["", "with torch.device('meta'): torch.empty(3)\n"], ids=["fresh", "used"])
@pytest.mark.stage("processes")
def test_device_contexts_mean_what_they_say_and_cuda_is_the_cpu(before):
    made = printed(f"import torch\n{before}{INSTALL}{DEVICES}")
    assert made == {
        "meta": ["meta"] * 6 + ["cpu", "meta", "cpu"],
        "cuda": ["cpu"] * 9,
        "cuda:0": ["cpu"] * 9,
        "cpu": ["cpu"] * 9,
        "default": ["meta"] * 6 + ["cpu", "meta", "cpu"],
        "none": ["cpu", "meta"],
    }


def test_torch_cuda_is_named_here_alone():
    package = Path(nemo_rl_mcore.__file__).parent
    named = {
        str(path.relative_to(package)) for path in package.rglob("*.py") if "torch.cuda" in path.read_text()
    }
    assert named == {"rank/accelerator.py"}
