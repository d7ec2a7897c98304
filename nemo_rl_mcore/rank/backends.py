"""The frameworks that can hold a policy's model, by import path: who imports a worker imports none of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.policy_backend import (
    BackendFactory,
    BackendOptions,
    GeneratorBackend,
    GeneratorFactory,
    PolicyBackend,
)

_BACKENDS = {"megatron_cfg": "nemo_rl_mcore.rank.megatron.backend"}
"""The section of the policy that switches a framework on, and where its `open_backend` and `open_generator` are."""


def open_backend(policy: PolicyConfig, options: BackendOptions) -> PolicyBackend:
    """Prepare this rank's device, then import the framework of the policy and build its backend."""
    factory: BackendFactory = _framework_of(policy).open_backend
    return factory(policy, options)


def open_generator(policy: PolicyConfig) -> GeneratorBackend:
    """Prepare this process's device, then import the framework of the policy and build a model that only generates."""
    factory: GeneratorFactory = _framework_of(policy).open_generator
    return factory(policy)


def launch_settings(policy: PolicyConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what CUDA has to read before its first use, where the environment does not say it.

    One hardware queue starts kernels in the order in which they are launched: with tensor or context parallelism the
    communication of a layer then begins before the products that it is to overlap with (megatron/training/arguments.py;
    Blackwell needs no such thing). Overlapped communication of experts needs several, which is CUDA's own default.
    """
    megatron = policy.megatron_cfg
    shared = megatron.tensor_model_parallel_size > 1 or megatron.context_parallel_size > 1
    if not shared or megatron.overlap_moe_expert_parallel_comm or _QUEUES in environ:
        return {}
    return {_QUEUES: "1"}


_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def _framework_of(policy: PolicyConfig) -> Any:
    os.environ.update(launch_settings(policy, os.environ))
    accelerator.install(int(os.environ.get("LOCAL_RANK", "0")))  # before Megatron is imported
    module = next(path for section, path in _BACKENDS.items() if getattr(policy, section).enabled)
    return import_module(module)
