"""What CUDA reads before its first use follows from the layout, and the user's own value stays."""

import os
from types import SimpleNamespace

import pytest

from nemo_rl_mcore.rank import accelerator, policy_backend
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
