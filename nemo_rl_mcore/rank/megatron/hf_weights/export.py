"""Weights of a sharded model as Hugging Face tensors: streamed, or written to a folder."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
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
from nemo_rl_mcore.rank.agreement import agreed_on_first, together
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.hf_weights.files import ShardWriter
from nemo_rl_mcore.rank.megatron.hf_weights.load import local_parameters
from nemo_rl_mcore.rank.megatron.hf_weights.packing import whole
from nemo_rl_mcore.rank.megatron.lora import adapters_of
from nemo_rl_mcore.rank.megatron.optimizer_state import gather_parameters
from nemo_rl_mcore.rank.policy_backend import DTYPES

SHARD_BYTES = 5 * 10**9


def full_tensors(
    chunks: Sequence[torch.nn.Module], policy: PolicyConfig, *, merged: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of the Hugging Face model, whole and on the device, on every rank, in the order of the layers.

    Every rank must iterate to the end: the steps are collective. One tensor is in memory at a time, with one weight
    beside it where a tensor holds those of all experts; it may share memory with a parameter, so copy what must outlast
    the iteration. Adapters are merged into their weights, unless `merged` is false.
    Raises ValueError for an architecture that no supported Hugging Face family has.
    """
    model = policy.model
    family_of(model)
    gather_parameters(chunks)
    own = {weight: parameter.detach() for weight, parameter in local_parameters(chunks, model)}
    adapters = adapters_of(chunks) if merged else {}

    def part_of(weight: Weight) -> torch.Tensor:
        return adapters[weight].merged(own[weight]) if weight in adapters else own[weight]

    whole_of = _whole_weights(own.keys(), part_of, policy)
    for names, of_names in groupby(all_weights(model), key=lambda weight: weight.names):
        weights = [*of_names]
        first = weights[0]
        if not first.slot.stacked:
            yield from zip(names, whole_of(first), strict=True)
            continue
        # One tensor holds those of all experts of a layer.
        tensors = _empty(first.slot.tensor_shapes(model), first, policy)
        for number, weight in enumerate(weights):
            for tensor, part in zip(tensors, whole_of(weight), strict=True):
                tensor[number].copy_(part)
        yield from zip(names, tensors, strict=True)


def adapter_tensors(
    chunks: Sequence[torch.nn.Module], policy: PolicyConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield adapters under the names of peft, as `full_tensors` does; the modules of one layer have the same A."""
    gather_parameters(chunks)
    dim, own = policy.megatron_cfg.peft.dim, dict[Weight, torch.Tensor]()
    for weight, adapter in adapters_of(chunks).items():
        a, b = adapter_weights(weight, dim)
        own |= {a: adapter.lora_A.detach(), b: adapter.lora_B.detach()}
    whole_of = _whole_weights(own.keys(), own.__getitem__, policy)
    for weight in adapted_weights(policy):
        a, b = adapter_weights(weight, dim)
        (whole_a,) = whole_of(a)
        for name, whole_b in zip(b.names, whole_of(b), strict=True):
            yield name.replace(LORA_B, LORA_A), whole_a
            yield name, whole_b


def _whole_weights(
    own: Collection[Weight], part_of: Callable[[Weight], torch.Tensor], policy: PolicyConfig
) -> Callable[[Weight], list[torch.Tensor]]:
    """Return a function from a weight to its whole tensors, collective too; own: weights that the rank has parts of."""
    model, pipeline = policy.model, parallel_groups.pipeline_group()
    experts = parallel_groups.expert_parallel_group()
    # The pipeline stage that holds each weight; the first one, where tied embeddings are on two.
    keys = sorted({_stage_key(weight) for weight in own})
    of_stages: list[list[str]] = [keys] * pipeline.size()
    if pipeline.size() > 1:
        dist.all_gather_object(of_stages, keys, group=pipeline)
    stage_of = {key: stage for stage, keys in reversed([*enumerate(of_stages)]) for key in keys}

    def whole_of(weight: Weight) -> list[torch.Tensor]:
        stage, layout = stage_of[_stage_key(weight)], weight.slot.layout
        shapes, is_here = weight.slot.shapes(model), stage == pipeline.rank()
        if is_here and (weight.expert is None or weight in own):
            cut = weight.expert is None and layout.dimension is not None
            tensors = whole(layout, _all_shards(part_of(weight), cut=cut), shapes, model)
        else:
            tensors = _empty(shapes, weight, policy)
        if is_here and weight.expert is not None:
            owner = weight.expert // ((model.num_moe_experts or 0) // experts.size())
            _broadcast(tensors, owner, experts)
        _broadcast(tensors, stage, pipeline)
        return tensors

    return whole_of


def save_pretrained(
    chunks: Sequence[torch.nn.Module],
    policy: PolicyConfig,
    folder: Path,
    *,
    origin: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that transformers and vLLM load; every rank takes part, and raises ValueError if it exists.

    The first rank writes, to a folder beside it that is renamed at the end. `origin` is the model that training
    started from; its family, special tokens and generation_config.json are kept.
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
        # Other ranks wait for a file here, with the long timeout, and not in the collectives of the next tensor.
        with together(f"the export of {name}") if name in writer.ends_of_files else nullcontext():
            if writes:
                writer.add(name, tensor)
    with together("the end of the export"):
        if writes:
            writer.close()
            _write_surroundings(policy, partial, origin or policy.model_name)
            partial.rename(folder)


def make_room(folder: Path, written: Path) -> None:
    """Make the folder `written`, empty; ValueError on all ranks if `folder`, its name in the end, is taken."""

    def make() -> None:
        if folder.exists():
            raise ValueError(f"the folder {str(folder)!r} exists already; name another one")
        shutil.rmtree(written, ignore_errors=True)
        written.mkdir(parents=True)

    agreed_on_first(make)


def _write_surroundings(policy: PolicyConfig, folder: Path, origin: str | None) -> None:
    """Write config.json, the tokenizer and, if the origin has one or answers have several ends, generation_config."""
    name = policy.tokenizer.name
    tokenizer = load_tokenizer(
        name,
        template=ChatTemplate(policy.tokenizer.chat_template),
        ends=end_ids(origin, name),
        stops=policy.generation.stop_token_ids or (),
    )
    tokenizer.save_as_hugging_face(folder)

    def write(file: str, content: Any) -> None:
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    origin_config = read_hf_config(origin) if origin else None
    config = hf_config_of(policy.model, dtype=policy.precision, origin=origin_config)
    for key, token in (("eos_token_id", tokenizer.eos_token_id), ("pad_token_id", tokenizer.pad_token_id)):
        if config[key] is None:
            config[key] = token
    write("config.json", config)
    source = local_folder(origin) if origin else None
    if source is not None and (source / GENERATION).is_file():
        ends = tokenizer.ends if len(tokenizer.ends) > 1 else tokenizer.eos_token_id
        write(GENERATION, {**read_object(source / GENERATION, "policy.model_name"), EOS: ends})


def _stage_key(weight: Weight) -> str:
    """Return a key for the weight's stage; a layer's experts share it, though each is on one rank of several."""
    return weight.names[0] if weight.expert is None else f"experts of layer {weight.layer}"


def _dtype(weight: Weight, policy: PolicyConfig) -> torch.dtype:
    return torch.float32 if weight.slot.buffer else DTYPES[policy.precision]


def _empty(shapes: Sequence[Sequence[int]], weight: Weight, policy: PolicyConfig) -> list[torch.Tensor]:
    dtype, device = _dtype(weight, policy), accelerator.device()
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]


def _all_shards(own: torch.Tensor, *, cut: bool) -> list[torch.Tensor]:
    group = parallel_groups.tensor_parallel_group()
    if not cut or group.size() == 1:
        return [own]
    shards = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(shards, own.contiguous(), group=group)
    return shards


def _broadcast(tensors: Sequence[torch.Tensor], source: int, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, group=group, group_src=source)
