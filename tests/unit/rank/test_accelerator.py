"""What stands in for CUDA must leave the rest of torch right; each test in a process, since installing is for good."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nemo_rl_mcore

INSTALL = "from nemo_rl_mcore.rank import accelerator; accelerator.install()\n"


def printed(code: str) -> Any:
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
def test_device_contexts_mean_what_they_say_and_cuda_is_the_cpu(before: str):
    made = printed(f"import torch\n{before}{INSTALL}{DEVICES}")
    assert made == {
        "meta": ["meta"] * 6 + ["cpu", "meta", "cpu"],
        "cuda": ["cpu"] * 9,
        "cuda:0": ["cpu"] * 9,
        "cpu": ["cpu"] * 9,
        "default": ["meta"] * 6 + ["cpu", "meta", "cpu"],
        "none": ["cpu", "meta"],
    }


def logprobs_of(folder: str) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.arange(12).unsqueeze(0)).logits
    return logits.log_softmax(-1).flatten().tolist()


@pytest.mark.stage("processes")
def test_transformers_loads_the_same_model_after_the_install(tmp_path: Path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    code = f"import json\n{INSTALL}{inspect.getsource(logprobs_of)}print(json.dumps(logprobs_of({str(tmp_path)!r})))"
    assert printed(code) == pytest.approx(logprobs_of(str(tmp_path)), abs=1e-6)


def test_torch_cuda_is_named_here_alone():
    package = Path(nemo_rl_mcore.__file__).parent
    named = {
        str(path.relative_to(package)) for path in package.rglob("*.py") if "torch.cuda" in path.read_text()
    }
    assert named == {"rank/accelerator.py"}
