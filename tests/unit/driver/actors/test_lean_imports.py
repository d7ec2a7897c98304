"""What processes of a run load, and what they do not need: a worker alone needs no Ray, engine or display."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
NOT_NEEDED = (
    *("ray", "vllm", "transformers", "tokenizers", "huggingface_hub", "hydra"),
    *("tensorboard", "rich", "psutil", "wandb", "pytest"),
)
BUILD_TRAIN_AND_SEND = """
import importlib, sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
import torch
from nemo_rl_mcore.rank import accelerator
accelerator.install()
import tiny
from nemo_rl_mcore.rank.refit import sender

class Nobody:
    def load_bucket(self, message):
        assert message["tensors"]

    def wait(self, ticket, timeout_s):
        assert ticket is None

for fused in (False, True):
    worker = tiny.worker(tiny.policy_config(megatron={"use_fused_linear_logprobs": fused}))
    batch = tiny.grpo_batch()
    batch["prev_logprobs"] = worker.get_logprobs(data=batch)["logprobs"]
    assert worker.train(batch, tiny.grpo_loss(fused=fused))["update_successful"]
worker.save_checkpoint(sys.argv[2] + "/saved")
worker.load_checkpoint(sys.argv[2] + "/saved")
worker.connect_engines(Nobody(), sender.RefitSettings("shared_memory", 1 << 20, 60.0))
sent = worker.send_weights()
assert sent.keys() == worker.prepare_refit_info().keys()
assert None not in sent.values()
tiny.leave()
worker.shutdown()
"""


@pytest.mark.stage("processes")
def test_the_worker_trains_saves_and_sends_where_little_else_is_installed(tmp_path):
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "tests/distributed"))
    run = subprocess.run(
        [sys.executable, "-c", BUILD_TRAIN_AND_SEND, ",".join(NOT_NEEDED), str(tmp_path)],
        env=os.environ | rank | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize(
    ("loaded", "not_needed"),
    [
        (
            "nemo_rl_mcore.environment.registry, nemo_rl_mcore.driver.actors.supervised",
            {
                "torch",
                "transformers",
                "nemo_rl_mcore.driver.actors.cluster",
                "nemo_rl_mcore.rank.accelerator",
            },
        ),
        ("nemo_rl_mcore.engine.vllm.engine", {"ray", "nemo_rl_mcore.config", "nemo_rl_mcore.losses"}),
        ("nemo_rl_mcore.driver.actors.actor", {"nemo_rl_mcore.config", "nemo_rl_mcore.driver.policy"}),
    ],
    ids=["environment", "vllm engine", "rank that sends"],
)
def test_what_a_process_of_a_run_leaves_alone(loaded, not_needed):
    run = subprocess.run(
        [sys.executable, "-c", f"import sys, {loaded}; print(*sys.modules)"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not not_needed & {*run.stdout.split()}
