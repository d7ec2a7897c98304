"""Add adapters to a sharded model, and write or read them in peft's folder format, which vLLM also loads.

A Megatron layer has one A, even if peft has several modules for it, such as queries, keys and values: each of them is
written with this A, and a folder is loaded only if they all have the same A.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data.strict_json import read_json
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.models import all_weights
from nemo_rl_mcore.models.adapters import KEY, LORA_A, LORA_B, adapted_weights, adapter_weights, linear_name
from nemo_rl_mcore.models.weights import Weight
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.agreement import agreed, together
from nemo_rl_mcore.rank.megatron.hf_weights.export import adapter_tensors, make_room
from nemo_rl_mcore.rank.megatron.hf_weights.load import local_parameters, own_part
from nemo_rl_mcore.rank.megatron.lora import MODULE, Adapter, add_adapter
from nemo_rl_mcore.rank.megatron.model_class import LanguageModel, modules_of

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
}
"""Keys of adapter_config.json and the only values that can be loaded; these are also the defaults."""


def add_adapters(policy: PolicyConfig, models: Sequence[LanguageModel], seed: int) -> None:
    """Add adapters to the linear layers in the config; RefusedError for a layer with several weights."""
    adapted, peft = adapted_weights(policy), policy.megatron_cfg.peft
    if not adapted:
        return

    def drawn(part: Weight, method: str, key: str) -> torch.Tensor:
        """Return this rank's part of initial values, the same on every layout. Source: Megatron-Bridge."""
        tensors: list[torch.Tensor] = []
        for number, shape in enumerate(part.slot.shapes(policy.model)):
            tensor = torch.zeros(*shape, device="cpu")
            digest = hashlib.blake2b(f"{key} {number}".encode(), digest_size=7).digest()
            generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest))
            if method == "xavier":
                torch.nn.init.xavier_normal_(tensor, generator=generator)
            elif method == "normal":
                torch.nn.init.normal_(tensor, std=0.2, generator=generator)
            elif method == "kaiming":
                torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
            tensors.append(tensor)
        return own_part(part, policy.model, lambda number, cut: tensors[number][cut])

    layers = {id(getattr(part, "weight", None)): part for model in models for part in model.modules()}
    for weight, parameter in [*local_parameters(models, policy.model)]:
        if weight not in adapted:
            continue
        layer, name = layers.get(id(parameter)), adapted[weight]
        if layer is None:
            raise RefusedError(
                f"policy.{KEY}.target_modules: {name}: Transformer Engine computes experts in one product, which "
                f"has no adapters; add '*.experts.*' to policy.{KEY}.exclude_modules, or set "
                "policy.megatron_cfg.transformer_impl: local",
                code="not-supported",
            )
        a, b = adapter_weights(weight, peft.dim)
        own_a = drawn(a, peft.lora_A_init_method, f"{seed} {name} {LORA_A}")
        own_b = drawn(b, peft.lora_B_init_method, f"{seed} {name} {LORA_B}")
        layer.add_module(MODULE, Adapter(weight, name, policy, parameter, [own_a, own_b]))
        layer.register_forward_hook(add_adapter)


def save_adapters(
    chunks: Sequence[torch.nn.Module], policy: PolicyConfig, folder: Path, *, origin: str | None
) -> None:
    """Write a new folder; every rank takes part, and raises ValueError if it exists. origin: the adapted model."""
    make_room(folder, folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in adapter_tensors(chunks, policy):
        activity.advance(f"exporting {name}")
        if dist.get_rank() == 0:
            tensors[name] = tensor.to("cpu", copy=True).contiguous()
    # Modules are listed by the last part of their names, unless a module without adapters has the same.
    linear = [weight for weight in all_weights(policy.model) if linear_name(weight)]
    adapted, every = (
        {name.removesuffix(".weight") for weight in weights for name in weight.names}
        for weights in (adapted_weights(policy), linear)
    )
    short, short_others = (
        {name.rpartition(".")[2] for name in names} for names in (adapted, every - adapted)
    )
    peft = policy.megatron_cfg.peft
    config = _PLAIN | {
        "base_model_name_or_path": origin,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": peft.dim,
        "lora_alpha": int(peft.alpha) if peft.alpha.is_integer() else peft.alpha,
        "lora_dropout": peft.dropout,
        "target_modules": sorted(adapted if short & short_others else short),
    }
    with together():
        if dist.get_rank() == 0:
            save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
            (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_adapters(chunks: Sequence[torch.nn.Module], policy: PolicyConfig, folder: Path) -> None:
    """Load this rank's adapters; every rank takes part.

    Raises RefusedError on all ranks for adapters of another kind, rank, scale or set of layers, and for different As of
    queries, keys and values, or of gate and up.
    """

    def fill() -> None:
        tensors = _read(folder, policy)
        for adapter in modules_of(Adapter, chunks):
            a, b = adapter_weights(adapter.weight, policy.megatron_cfg.peft.dim)
            of_a = [tensors[name.replace(LORA_B, LORA_A)] for name in b.names]
            if not all(torch.equal(of_a[0], other) for other in of_a[1:]):
                raise _refused(
                    folder,
                    f"has different As for {', '.join(adapter.weight.names)}, which are one layer with one A in "
                    "Megatron; merge it into its model, and start from that",
                )
            of_b = [tensors[name] for name in b.names]
            for own, parameter, whole in ((a, adapter.lora_A, of_a[:1]), (b, adapter.lora_B, of_b)):
                shapes = own.slot.shapes(policy.model)
                if tuple(tuple(tensor.shape) for tensor in whole) != shapes:
                    raise _refused(folder, f"has {own.names[0]} of another shape than {shapes[0]}")
                part = own_part(own, policy.model, lambda number, cut, whole=whole: whole[number][cut])
                with torch.no_grad():
                    parameter.copy_(part)

    agreed(fill)


def _read(folder: Path, policy: PolicyConfig) -> dict[str, torch.Tensor]:
    """Return the folder's tensors; RefusedError unless they are the policy's adapters by name, rank and scale."""
    peft = policy.megatron_cfg.peft
    try:
        config: Any = read_json(folder / CONFIG)
        tensors = load_file(folder / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise _refused(folder, f"cannot be read as a folder in peft's format: {error}") from error
    keys = {"r": "dim", "lora_alpha": "alpha"}
    wanted = _PLAIN | {"r": peft.dim, "lora_alpha": peft.alpha, "rank_pattern": {}, "alpha_pattern": {}}
    for name, value in wanted.items():
        given = config.get(name, value)
        if given != value and (given or value):
            of_recipe = f" (policy.{KEY}.{keys[name]})" if name in keys else ""
            raise _refused(folder, f"has {name}: {given}; {value}{of_recipe} can be loaded")
    of_b = {name for weight in adapted_weights(policy) for name in adapter_weights(weight, peft.dim)[1].names}
    names = of_b | {name.replace(LORA_B, LORA_A) for name in of_b}
    for what, different in (("lacks", names - tensors.keys()), ("has", tensors.keys() - names)):
        if different:
            few = ", ".join(sorted(different)[:4])
            raise _refused(folder, f"{what} {few} ({len(different)} in all): see policy.{KEY}.target_modules")
    return tensors


def _refused(folder: Path, what: str) -> RefusedError:
    return RefusedError(f"policy.{KEY}.pretrained_adapter: {str(folder)!r} {what}", code="other-adapter")
