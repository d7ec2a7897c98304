"""Load the weights of a Hugging Face folder: each rank reads its own part of each tensor, one tensor at a time.

A process that holds the whole model also receives tensors one by one, in any order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_rl_mcore.config import ConfigError, ModelConfig, PolicyConfig
from nemo_rl_mcore.data.hub import fetched_folder
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.models import all_weights, family_of, missing_family, outside_of_layers
from nemo_rl_mcore.models.pretrained import differences, pretrained_model
from nemo_rl_mcore.models.weights import EXPERT_BIAS, Weight
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.hf_weights.files import TensorFiles
from nemo_rl_mcore.rank.megatron.hf_weights.packing import find_weight, pack
from nemo_rl_mcore.rank.megatron.model_class import language_models

# Old checkpoints contain tensors that are computed from the config.
_COMPUTED = r".+\.rotary_emb\.inv_freq"
_SHOWN = 8
_OF_TABLE = re.compile(rf".*\.{EXPERT_BIAS}")
"""Buffers that are weights; all others are computed."""
OF_ADAPTERS = re.compile(r".*\.lora\.lora_[AB]")


@dataclass(frozen=True)
class Place:
    """The places of this rank among the ranks that share layers (tensor), stages (pipeline) and experts."""

    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    expert: dist.ProcessGroup


def this_place() -> Place:
    experts = cast(dist.ProcessGroup, parallel_state.get_expert_model_parallel_group())
    return Place(parallel_groups.tensor_parallel_group(), parallel_groups.pipeline_group(), experts)


def local_parameters(
    chunks: Sequence[torch.nn.Module], model: ModelConfig, place: Place
) -> Iterator[tuple[Weight, torch.Tensor]]:
    """Yield the parameters of this rank's chunks, and the biases of experts, with the weights they are parts of."""
    first_expert = place.expert.rank() * ((model.num_moe_experts or 0) // place.expert.size())
    for stage in language_models(chunks):
        decoder: Any = stage.decoder
        parts: int = getattr(decoder, "parts_of_a_layer", 1)  # of a HybridModel
        # Which layer of the whole model, from 0, each one in the list of a stage is, or is a part of.
        layers = [(layer.layer_number - 1) // parts for layer in decoder.layers]
        buffers = ((name, buffer) for name, buffer in stage.named_buffers() if _OF_TABLE.fullmatch(name))
        for name, parameter in (*stage.named_parameters(), *buffers):
            if not OF_ADAPTERS.fullmatch(name):
                yield find_weight(name, layers, first_expert, model), parameter


def load_pretrained(policy: PolicyConfig, chunks: Sequence[torch.nn.Module]) -> None:
    """Fill this rank's chunks with the weights of `policy.model_name`, fetched from the hub if need be.

    Raises ValueError when config.json, the tensors' names or their shapes are not those of policy.model.
    """
    assert policy.model_name is not None
    activity.advance(f"fetching {policy.model_name}")
    folder = fetched_folder(policy.model_name)
    # Checked again here: at load the model may have been known from a table only, or not at all.
    found = pretrained_model(str(folder), policy.hf_config_overrides)
    assert found is not None
    if problems := differences(policy.model, found, str(folder)):
        raise ConfigError(problem.below("policy") for problem in problems)
    with TensorFiles(folder) as files:
        load_weights(files, chunks, policy.model)


def load_weights(files: TensorFiles, chunks: Sequence[torch.nn.Module], model: ModelConfig) -> None:
    """Fill this rank's chunks from the files, which must hold the tensors of that architecture and no others."""
    _check_names(files, model)
    place, outside = this_place(), outside_of_layers(model)
    stored_although_tied = model.tie_word_embeddings and not files.names.isdisjoint(
        outside.output.hugging_face
    )
    with torch.no_grad():
        for weight, parameter in local_parameters(chunks, model, place):
            activity.advance(f"loading {', '.join(weight.names)}")
            fill(parameter, _read(files, weight, place, model))
            # A sum is one pass on the device without memory, and keeps NaN and infinities.
            if not torch.isfinite(parameter.sum()):
                _require_finite(files, weight)
            if weight.slot is outside.embedding and stored_although_tied:
                output = _read(files, Weight(outside.output), place, model).to(parameter)
                if not torch.equal(output, parameter[: output.shape[0]]):
                    raise ValueError(
                        f"{outside.output.hugging_face[0]} differs from {outside.embedding.hugging_face[0]}, and "
                        "config.json says tie_word_embeddings: true; set it to false there"
                    )


def _require_finite(files: TensorFiles, weight: Weight) -> None:
    """Raise ValueError, naming the tensor, if a weight is not finite; a sum alone may overflow for finite ones."""
    for name in weight.names:
        values = files.read(name, (slice(None),) * len(files.shape(name)))
        wrong = values[~torch.isfinite(values)]
        if len(wrong):
            raise RefusedError(
                f"{str(files.path_of(name))!r}: {name} holds {float(wrong[0])}; {len(wrong)} of its "
                f"{values.numel()} weights are not finite; fetch or export the model again",
                code="not-finite-weights",
            )


def _check_names(files: TensorFiles, model: ModelConfig) -> None:
    found = files.names
    # Not loaded: computed tensors, and prediction layers in the files of some families.
    predicting = None if missing_family(model) else family_of(model).predicting
    left_out = re.compile(_COMPUTED if predicting is None else f"{_COMPUTED}|{predicting(model)}")
    expected = {name for weight in all_weights(model) for name in weight.names}
    output = outside_of_layers(model).output.hugging_face
    allowed = expected | ({*output} if model.tie_word_embeddings else set[str]())
    unexpected = sorted(
        name
        for name in found - allowed
        # Without shared experts a file has tensors of them without an entry.
        if not left_out.fullmatch(name) and 0 not in files.shape(name)
    )
    complaints = [
        f"{len(names)} {kind}: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        for kind, names in (("missing", sorted(expected - found)), ("unexpected", unexpected))
        if names
    ]
    if complaints:
        raise ValueError(f"the tensors are not those of the architecture; {'; '.join(complaints)}")


def _read(files: TensorFiles, weight: Weight, place: Place, model: ModelConfig) -> torch.Tensor:
    shapes, layout = weight.slot.shapes(model), weight.slot.layout
    for name, shape in zip(weight.names, weight.slot.tensor_shapes(model), strict=True):
        if files.shape(name) != shape:
            raise ValueError(
                f"{name} has the shape {files.shape(name)}, and the architecture gives it {shape}"
            )
    # Experts are not cut, and a tensor of all experts has a part of one.
    rank, ranks = (0, 1) if weight.expert is not None else (place.tensor.rank(), place.tensor.size())
    expert = weight.expert if weight.slot.stacked else None
    parts: list[torch.Tensor] = []
    for name, shape in zip(weight.names, shapes, strict=True):
        cuts: list[torch.Tensor] = []
        for cut in layout.cuts(shape, rank, ranks, model):
            if expert is None:
                cuts.append(files.read(name, cut))
            else:
                cuts.append(files.read(name, (slice(expert, expert + 1), *cut))[0])
        parts.append(cuts[0] if len(cuts) == 1 else torch.cat(cuts, layout.dimension or 0))
    return pack(layout.packing, parts, model)


def fill(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Set a parameter, whose rows beyond the given ones are padding."""
    rows = values.shape[0]
    assert values.shape[1:] == parameter.shape[1:]
    assert rows <= parameter.shape[0]
    parameter[:rows].copy_(values)
    parameter[rows:].zero_()  # padding rows of the embedding


class WholeWeightFilling:
    """Implements `rank.policy_backend.WeightFilling`: a parameter is set once all its tensors have arrived."""

    def __init__(self, chunks: Sequence[torch.nn.Module], model: ModelConfig) -> None:
        self._model = model
        self._parameters = dict(local_parameters(chunks, model, this_place()))
        self._weights_of: dict[str, list[Weight]] = defaultdict(list)
        for weight in self._parameters:
            for name in weight.names:
                self._weights_of[name].append(weight)
        self._missing = set(self._weights_of)
        self._parts: dict[Weight, dict[str, torch.Tensor]] = {}

    def take(self, name: str, tensor: torch.Tensor) -> None:
        weights = self._weights_of.get(name)
        if not weights:
            raise ValueError(f"the model has no tensor {name}")
        slot = weights[0].slot
        shape = slot.tensor_shapes(self._model)[weights[0].names.index(name)]
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has the shape {tuple(tensor.shape)}, and the architecture gives it {shape}"
            )
        self._missing.discard(name)
        for weight in weights:
            stacked = slot.stacked and weight.expert is not None
            part = tensor[weight.expert] if stacked else tensor
            parts = self._parts.setdefault(weight, {})
            parts[name] = part
            if len(parts) < len(weight.names):
                parts[name] = part.clone()
                continue
            del self._parts[weight]
            packed = pack(weight.slot.layout.packing, [parts[each] for each in weight.names], self._model)
            with torch.no_grad():
                fill(self._parameters[weight], packed)

    def missing(self) -> Sequence[str]:
        return sorted(self._missing)
