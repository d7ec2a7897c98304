"""Adapters given to a sharded model, and as a folder of the library peft, which vLLM loads too: written, and read.

A layer of Megatron that is several modules there, such as queries, keys and values, has one A: each module is written
with it, and can be read only where they have the same one.
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

from nemo_rl_mcore.config import ModelConfig, PolicyConfig
from nemo_rl_mcore.data.strict_json import read_json
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.models import all_weights
from nemo_rl_mcore.models.adapters import KEY, LORA_A, LORA_B, adapted_weights, adapter_weights, linear_name
from nemo_rl_mcore.models.weights import Weight
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.agreement import agreed, agreed_on_first
from nemo_rl_mcore.rank.megatron.hf_weights.export import adapter_tensors
from nemo_rl_mcore.rank.megatron.hf_weights.load import local_parameters, this_place
from nemo_rl_mcore.rank.megatron.hf_weights.packing import pack
from nemo_rl_mcore.rank.megatron.lora import MODULE, Adapter, adapters_of, add_adapter
from nemo_rl_mcore.rank.megatron.model_class import LanguageModel

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
}
"""Keys of adapter_config.json with the values that are read; a key that is left out has its value."""


def add_adapters(policy: PolicyConfig, models: Sequence[LanguageModel], seed: int) -> None:
    """Give the linear layers that the config names their adapters; nothing unless `peft.enabled`.

    Raises RefusedError for a layer that holds several weights, as experts of Transformer Engine.
    """
    adapted, peft = adapted_weights(policy), policy.megatron_cfg.peft
    if not adapted:
        return
    methods = peft.lora_A_init_method, peft.lora_B_init_method
    layers = {id(getattr(part, "weight", None)): part for model in models for part in model.modules()}
    for weight, parameter in [*local_parameters(models, policy.model, this_place())]:
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
        own: list[torch.Tensor] = []
        for part, method in zip(adapter_weights(weight, peft.dim), methods, strict=True):
            shapes, what = part.slot.shapes(policy.model), (LORA_A, LORA_B)[len(own)]
            keys = (f"{seed} {name} {what} {number}" for number in range(len(shapes)))
            drawn = [_drawn(method, shape, key) for shape, key in zip(shapes, keys, strict=True)]
            own.append(own_part(part, drawn, policy.model))
        layer.add_module(MODULE, Adapter(weight, name, policy, parameter, own))
        layer.register_forward_hook(add_adapter)


def _drawn(method: str, shape: Sequence[int], key: str) -> torch.Tensor:
    """Return the start of a whole tensor, the same on every layout. Source: Megatron-Bridge, ParallelLinearAdapter."""
    tensor = torch.zeros(*shape, device="cpu")
    digest = hashlib.blake2b(key.encode(), digest_size=7).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest))
    match method:
        case "xavier":
            torch.nn.init.xavier_normal_(tensor, generator=generator)
        case "normal":
            torch.nn.init.normal_(tensor, std=0.2, generator=generator)
        case "kaiming":
            torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
        case _:
            pass
    return tensor


def own_part(weight: Weight, tensors: Sequence[torch.Tensor], model: ModelConfig) -> torch.Tensor:
    """Return what this rank holds of a weight that the whole tensors make up."""
    layout, tensor = weight.slot.layout, this_place().tensor
    rank, ranks = (0, 1) if weight.expert is not None else (tensor.rank(), tensor.size())
    parts: list[torch.Tensor] = []
    for whole in tensors:
        cuts = [whole[cut] for cut in layout.cuts(whole.shape, rank, ranks, model)]
        parts.append(torch.cat(cuts, layout.dimension or 0))
    return pack(layout.packing, parts, model)


def save_adapters(
    chunks: Sequence[torch.nn.Module], policy: PolicyConfig, folder: Path, *, origin: str | None
) -> None:
    """Write a new folder; every rank takes part. origin: the model that the adapters are beside.

    Raises ValueError on all ranks when the folder exists.
    """

    def make_room() -> None:
        if folder.exists():
            raise ValueError(f"the folder {str(folder)!r} exists already; name another one")
        folder.mkdir(parents=True)

    agreed_on_first(make_room)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in adapter_tensors(chunks, policy):
        activity.advance(f"exporting {name}")
        if dist.get_rank() == 0:
            tensors[name] = tensor.to("cpu", copy=True).contiguous()
    peft = policy.megatron_cfg.peft
    config = _PLAIN | {
        "base_model_name_or_path": origin,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": peft.dim,
        "lora_alpha": int(peft.alpha) if peft.alpha.is_integer() else peft.alpha,
        "lora_dropout": peft.dropout,
        "target_modules": _target_modules(policy),
    }

    def write() -> None:
        save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    agreed_on_first(write)


def _target_modules(policy: PolicyConfig) -> list[str]:
    """Return the modules with adapters: by the last part of their names where it says which, else by the whole."""

    def modules(weights: Any) -> set[str]:
        return {name.removesuffix(".weight") for weight in weights for name in weight.names}

    def last(names: set[str]) -> set[str]:
        return {name.rpartition(".")[2] for name in names}

    adapted = modules(adapted_weights(policy))
    others = modules(weight for weight in all_weights(policy.model) if linear_name(weight)) - adapted
    return sorted(adapted if last(adapted) & last(others) else last(adapted))


def load_adapters(chunks: Sequence[torch.nn.Module], policy: PolicyConfig, folder: Path) -> None:
    """Fill this rank's adapters; every rank takes part.

    Raises RefusedError on all ranks for adapters of another kind, of another rank or scale, of other layers, and for
    those of queries, keys and values, or of gate and up, with different As.
    """

    def fill() -> None:
        tensors = _read(folder, policy)
        for weight, adapter in adapters_of(chunks).items():
            a, b = adapter_weights(weight, policy.megatron_cfg.peft.dim)
            of_a = [tensors[name.replace(LORA_B, LORA_A)] for name in b.names]
            if not all(torch.equal(of_a[0], other) for other in of_a[1:]):
                raise _refused(
                    folder,
                    f"has different As for {', '.join(weight.names)}, which are one layer with one A in Megatron; "
                    "merge it into its model, and start from that",
                )
            of_b = [tensors[name] for name in b.names]
            for own, parameter, whole in ((a, adapter.lora_A, of_a[:1]), (b, adapter.lora_B, of_b)):
                shapes = own.slot.shapes(policy.model)
                if tuple(tuple(tensor.shape) for tensor in whole) != shapes:
                    raise _refused(folder, f"has {own.names[0]} of another shape than {shapes[0]}")
                with torch.no_grad():
                    parameter.copy_(own_part(own, whole, policy.model))

    agreed(fill)


def _read(folder: Path, policy: PolicyConfig) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder, which are those of the policy's adapters by name, rank and scale."""
    peft = policy.megatron_cfg.peft
    try:
        config: Any = read_json(folder / CONFIG)
        tensors = load_file(folder / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise _refused(folder, f"cannot be read as a folder of peft: {error}") from error
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
