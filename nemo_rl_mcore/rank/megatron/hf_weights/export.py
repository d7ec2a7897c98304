"""Export a sharded model's weights as Hugging Face tensors: streamed, or written to a folder."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data.hub import EOS, GENERATION, end_ids, local_folder
from nemo_rl_mcore.data.tokenizer import ChatTemplate, load_tokenizer
from nemo_rl_mcore.models import all_weights, family_of
from nemo_rl_mcore.models.adapters import LORA_A, LORA_B, adapted_weights, adapter_weights
from nemo_rl_mcore.models.config_json import hf_config_of
from nemo_rl_mcore.models.pretrained import read_hf_config, read_object
from nemo_rl_mcore.models.weights import Weight
from nemo_rl_mcore.rank import accelerator, activity
from nemo_rl_mcore.rank.agreement import together
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.hf_weights.files import ShardWriter, whole
from nemo_rl_mcore.rank.megatron.hf_weights.load import local_parameters
from nemo_rl_mcore.rank.megatron.lora import Adapter
from nemo_rl_mcore.rank.megatron.model_class import modules_of
from nemo_rl_mcore.rank.megatron.optimizer_state import gather_parameters
from nemo_rl_mcore.rank.policy_backend import DTYPES

SHARD_BYTES = 5 * 10**9


def full_tensors(
    chunks: Sequence[torch.nn.Module], policy: PolicyConfig, *, merged: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of the Hugging Face model, whole and on the device, on every rank, layer by layer.

    Every rank must iterate to the end, since each step is collective. Only one tensor is in memory at a time, plus one
    expert's weight if the tensor holds all experts. A tensor may share memory with a parameter, so copy it to keep it.
    Adapters are merged into their weights, unless `merged` is false. Raises ValueError for an architecture that no
    supported Hugging Face family has.
    """
    model = policy.model
    family_of(model)
    gather_parameters(chunks)
    own = {weight: parameter.detach() for weight, parameter in local_parameters(chunks, model)}
    adapters = {adapter.weight: adapter for adapter in modules_of(Adapter, chunks) if merged}
    whole_of = _whole_weights(own, policy, adapters)
    for names, of_names in groupby(all_weights(model), key=lambda weight: weight.names):
        weights = [*of_names]
        first = weights[0]
        if not first.slot.stacked:
            yield from zip(names, whole_of(first), strict=True)
            continue
        # One tensor holds this weight of all the layer's experts.
        tensors = _empty(first.slot.tensor_shapes(model), first, policy)
        for number, weight in enumerate(weights):
            for tensor, part in zip(tensors, whole_of(weight), strict=True):
                tensor[number].copy_(part)
        yield from zip(names, tensors, strict=True)


def adapter_tensors(
    chunks: Sequence[torch.nn.Module], policy: PolicyConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the adapters' tensors by peft's names, as `full_tensors` does; modules of one layer have the same A."""
    gather_parameters(chunks)
    dim, own = policy.megatron_cfg.peft.dim, dict[Weight, torch.Tensor]()
    for adapter in modules_of(Adapter, chunks):
        a, b = adapter_weights(adapter.weight, dim)
        own |= {a: adapter.lora_A.detach(), b: adapter.lora_B.detach()}
    whole_of = _whole_weights(own, policy, {})
    for weight in adapted_weights(policy):
        a, b = adapter_weights(weight, dim)
        (whole_a,) = whole_of(a)
        for name, whole_b in zip(b.names, whole_of(b), strict=True):
            yield name.replace(LORA_B, LORA_A), whole_a
            yield name, whole_b


def _whole_weights(
    own: Mapping[Weight, torch.Tensor], policy: PolicyConfig, adapters: Mapping[Weight, Adapter]
) -> Callable[[Weight], list[torch.Tensor]]:
    """Return a collective function from a weight to its whole tensors; own: this rank's parts; adapters: to merge."""
    model = policy.model
    pipeline, experts = parallel_groups.group("pipeline"), parallel_groups.group("expert")
    # The pipeline stage of each weight; for tied embeddings, which are on two stages, the first.
    keys = sorted({_stage_key(weight) for weight in own})
    of_stages: list[list[str]] = [keys] * pipeline.size()
    if pipeline.size() > 1:
        dist.all_gather_object(of_stages, keys, group=pipeline)
    stage_of = {key: stage for stage, keys in reversed([*enumerate(of_stages)]) for key in keys}

    def whole_of(weight: Weight) -> list[torch.Tensor]:
        stage, layout = stage_of[_stage_key(weight)], weight.slot.layout
        shapes, is_here = weight.slot.shapes(model), stage == pipeline.rank()
        if is_here and (weight.expert is None or weight in own):
            part, cut = own[weight], weight.expert is None and layout.dimension is not None
            if weight in adapters:
                part = adapters[weight].merged(part)
            tensors = whole(layout, _all_shards(part, cut=cut), shapes, model)
        else:
            tensors = _empty(shapes, weight, policy)
        sources = [(pipeline, stage)]
        if is_here and weight.expert is not None:
            owner = weight.expert // ((model.num_moe_experts or 0) // experts.size())
            sources = [(experts, owner), (pipeline, stage)]
        for group, source in sources:
            for tensor in tensors if group.size() > 1 else ():
                dist.broadcast(tensor, group=group, group_src=source)
        return tensors

    return whole_of


def save_pretrained(
    chunks: Sequence[torch.nn.Module],
    policy: PolicyConfig,
    folder: Path,
    origin: str | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that transformers and vLLM load; every rank takes part, and raises ValueError if it exists.

    The first rank writes, to a folder next to this one that is renamed at the end. origin: the model that training
    started from, whose family, special tokens and generation_config.json are kept.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    make_room(folder, partial)
    writes = dist.get_rank() == 0
    bytes_of = {
        name: math.prod(shape) * _dtype(weight, policy).itemsize
        for weight in all_weights(policy.model)
        for name, shape in zip(weight.names, weight.slot.tensor_shapes(policy.model), strict=True)
    }
    writer = ShardWriter(partial, bytes_of, shard_bytes)
    for name, tensor in full_tensors(chunks, policy):
        activity.advance(f"exporting {name}")
        # Other ranks wait for a file here, with the long timeout, and not in the next tensor's collectives.
        with together(f"the export of {name}") if name in writer.ends_of_files else nullcontext():
            if writes:
                writer.add(name, tensor)
    with together("the end of the export"):
        if writes:
            writer.close()
            _write_surroundings(policy, partial, origin or policy.model_name)
            partial.rename(folder)


def make_room(folder: Path, written: Path) -> None:
    """Create `written`, an empty folder; ValueError on all ranks if `folder`, its final name, exists."""
    with together():
        if dist.get_rank() == 0:
            if folder.exists():
                raise ValueError(f"the folder {str(folder)!r} exists already; name another one")
            shutil.rmtree(written, ignore_errors=True)
            written.mkdir(parents=True)


def _write_surroundings(policy: PolicyConfig, folder: Path, origin: str | None) -> None:
    """Write config.json, the tokenizer and, if the origin has one, generation_config.json."""
    name = policy.tokenizer.name
    tokenizer = load_tokenizer(
        name,
        template=ChatTemplate(policy.tokenizer.chat_template),
        ends=end_ids(origin, name),
        stops=policy.generation.stop_token_ids or (),
    )
    tokenizer.save_as_hugging_face(folder)

    origin_config = read_hf_config(origin) if origin else None
    config = hf_config_of(policy.model, dtype=policy.precision, origin=origin_config)
    for key, token in (("eos_token_id", tokenizer.eos_token_id), ("pad_token_id", tokenizer.pad_token_id)):
        if config[key] is None:
            config[key] = token
    files: dict[str, Any] = {"config.json": config}
    source = local_folder(origin) if origin else None
    if source is not None and (source / GENERATION).is_file():
        ends = tokenizer.ends if len(tokenizer.ends) > 1 else tokenizer.eos_token_id
        files[GENERATION] = {**read_object(source / GENERATION, "policy.model_name"), EOS: ends}
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _stage_key(weight: Weight) -> str:
    """Return a weight's key in the table of stages; a layer's experts, which are on several ranks, share one."""
    return weight.names[0] if weight.expert is None else f"experts of layer {weight.layer}"


def _dtype(weight: Weight, policy: PolicyConfig) -> torch.dtype:
    return torch.float32 if weight.slot.buffer else DTYPES[policy.precision]


def _empty(shapes: Sequence[Sequence[int]], weight: Weight, policy: PolicyConfig) -> list[torch.Tensor]:
    dtype, device = _dtype(weight, policy), accelerator.device()
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]


def _all_shards(own: torch.Tensor, *, cut: bool) -> list[torch.Tensor]:
    group = parallel_groups.group("tensor")
    if not cut or group.size() == 1:
        return [own]
    shards = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(shards, own.contiguous(), group=group)
    return shards
