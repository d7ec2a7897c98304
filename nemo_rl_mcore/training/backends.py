"""The frameworks that can hold a policy's model, by import path: who imports a worker imports none of them."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from nemo_rl_mcore import accelerator
from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.training.policy_backend import (
    BackendFactory,
    BackendOptions,
    GeneratorBackend,
    GeneratorFactory,
    PolicyBackend,
)

_BACKENDS = {"megatron_cfg": "nemo_rl_mcore.megatron.backend"}
"""The section of the policy that switches a framework on, and where its `open_backend` and `open_generator` are."""


def open_backend(policy: PolicyConfig, options: BackendOptions) -> PolicyBackend:
    """Prepare this rank's device, then import the framework of the policy and build its backend."""
    factory: BackendFactory = _framework_of(policy).open_backend
    return factory(policy, options)


def open_generator(policy: PolicyConfig) -> GeneratorBackend:
    """Prepare this process's device, then import the framework of the policy and build a model that only generates."""
    factory: GeneratorFactory = _framework_of(policy).open_generator
    return factory(policy)


def _framework_of(policy: PolicyConfig) -> Any:
    accelerator.install(int(os.environ.get("LOCAL_RANK", "0")))  # before Megatron is imported
    module = next(path for section, path in _BACKENDS.items() if getattr(policy, section).enabled)
    return import_module(module)
