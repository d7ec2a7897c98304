"""What a Mamba-2 layer is made of: Megatron's mixer on a GPU, and the reference without its kernels on CPUs."""

from __future__ import annotations

import importlib.util
from typing import Any, cast

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

from nemo_rl_mcore.config import MegatronConfig
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron.layer_specs import norm_of, use_transformer_engine
from nemo_rl_mcore.rank.megatron.mamba_mixer import ReferenceMambaLayer, ReferenceMambaMixer

_KERNELS = ("mamba_ssm", "causal_conv1d", "einops")


def mamba_layer_spec(config: MegatronConfig) -> ModuleSpec:
    """Return a layer with the norm before it; on CPUs it is `ReferenceMambaLayer`.

    Raises RefusedError for ranks on GPUs without the packages of Megatron's kernels, or with local layers, whose masks
    those kernels do not read.
    """
    if accelerator.has_cuda():
        return _on_gpu(config)
    return ModuleSpec(
        module=ReferenceMambaLayer,
        submodules=_layer(
            ModuleSpec(
                module=ReferenceMambaMixer,
                submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
            ),
            norm=norm_of(config),
            # Transformer Engine has the norm and the projection in one module.
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )


def _on_gpu(config: MegatronConfig) -> ModuleSpec:
    missing = [package for package in _KERNELS if importlib.util.find_spec(package) is None]
    if missing or not use_transformer_engine(config):
        raise RefusedError(
            "policy.model.hybrid_layer_pattern: on GPUs Mamba layers need Transformer Engine's layers "
            f"(policy.megatron_cfg.transformer_impl: {config.transformer_impl}) and the packages "
            f"{', '.join(_KERNELS)}, of which are missing: {', '.join(missing) or 'none'}; install the extra te and "
            "them",
            code="missing-package",
        )
    from megatron.core.extensions.transformer_engine import (
        TELayerNormColumnParallelLinear,
        TERowParallelLinear,
    )

    projections = MambaMixerSubmodules(in_proj=TELayerNormColumnParallelLinear, out_proj=TERowParallelLinear)
    return ModuleSpec(
        module=MambaLayer, submodules=_layer(ModuleSpec(module=MambaMixer, submodules=projections))
    )


def _layer(mixer: ModuleSpec, **others: Any) -> MambaLayerSubmodules:
    # Upstream's annotation names no functions, and hybrid_layer_specs.py gives it this one.
    add = cast(type, get_bias_dropout_add)
    return MambaLayerSubmodules(mixer=mixer, mamba_bda=add, **others)
