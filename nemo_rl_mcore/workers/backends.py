"""The frameworks that can hold a policy's model, by import path: who imports a worker imports none of them."""

from __future__ import annotations

import os
from importlib import import_module

from nemo_rl_mcore import accelerator
from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.training.policy_backend import BackendFactory, BackendOptions, PolicyBackend

_BACKENDS = {"megatron_cfg": "nemo_rl_mcore.megatron.backend:open_backend"}
"""The section of the policy that switches a framework on, and its `BackendFactory`."""


def open_backend(policy: PolicyConfig, options: BackendOptions) -> PolicyBackend:
    """Prepare this rank's device, then import the framework of the policy and build its backend."""
    accelerator.install(int(os.environ.get("LOCAL_RANK", "0")))  # before Megatron is imported
    path = next(path for section, path in _BACKENDS.items() if getattr(policy, section).enabled)
    module, name = path.split(":")
    factory: BackendFactory = getattr(import_module(module), name)
    return factory(policy, options)
