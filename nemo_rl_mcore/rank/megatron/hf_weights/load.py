"""Load a Hugging Face folder's weights: each rank reads its part of each tensor, one tensor at a time.

A process with the whole model can also receive the tensors one by one, in any order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from nemo_rl_mcore.config import ConfigError, ModelConfig, PolicyConfig
from nemo_rl_mcore.data.hub import fetched_folder
from nemo_rl_mcore.models import all_weights, family_of, missing_family, outside_of_layers
from nemo_rl_mcore.models.pretrained import differences, pretrained_model
from nemo_rl_mcore.models.weights import EXPERT_BIAS, Packing, Weight
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.hf_weights.files import TensorFiles, find_weight, pack
from nemo_rl_mcore.rank.megatron.model_class import language_models

# Tensors in old checkpoints that are computed from the config.
_COMPUTED = r".+\.rotary_emb\.inv_freq"
_SHOWN = 8
_OF_TABLE = re.compile(rf".*\.{EXPERT_BIAS}")
"""Buffers that are weights; all others are computed."""
OF_ADAPTERS = re.compile(r".*\.lora\.lora_[AB]")


def local_parameters(
    chunks: Sequence[torch.nn.Module], model: ModelConfig
) -> Iterator[tuple[Weight, torch.Tensor]]:
    """Yield the parameters and experts' biases of this rank's chunks, each with its weight."""
    experts = parallel_groups.group("expert")
    first_expert = experts.rank() * ((model.num_moe_experts or 0) // experts.size())
    for stage in language_models(chunks):
        decoder: Any = stage.decoder
        parts: int = getattr(decoder, "parts_of_a_layer", 1)  # of a HybridModel
        # The number, from 0, of each layer of the stage in the whole model.
        layers = [(layer.layer_number - 1) // parts for layer in decoder.layers]
        buffers = ((name, buffer) for name, buffer in stage.named_buffers() if _OF_TABLE.fullmatch(name))
        for name, parameter in (*stage.named_parameters(), *buffers):
            if not OF_ADAPTERS.fullmatch(name):
                yield find_weight(name, layers, first_expert, model), parameter


def own_part(
    weight: Weight, model: ModelConfig, read: Callable[[int, tuple[slice, ...]], torch.Tensor]
) -> torch.Tensor:
    """Return this rank's part of a weight; read: returns a slice of the weight's tensor with this number."""
    layout, ranks = weight.slot.layout, parallel_groups.group("tensor")
    place = (0, 1) if weight.expert is not None else (ranks.rank(), ranks.size())  # experts are not cut
    # Several ranks may share a query group (see attention.py of Megatron): each then has a piece of its packed rows.
    sharing = 1
    if layout.packing is Packing.QKV and ranks.size() > model.shape.query_groups:
        sharing = ranks.size() // model.shape.query_groups
        place = ranks.rank() // sharing, model.shape.query_groups
    parts: list[torch.Tensor] = []
    for number, shape in enumerate(weight.slot.shapes(model)):
        cuts = [read(number, cut) for cut in layout.cuts(shape, *place, model, number)]
        parts.append(cuts[0] if len(cuts) == 1 else torch.cat(cuts, layout.dimension or 0))
    return pack(layout.packing, parts, model).chunk(sharing)[ranks.rank() % sharing]


def load_pretrained(policy: PolicyConfig, chunks: Sequence[torch.nn.Module]) -> None:
    """Load `policy.model_name` into this rank's chunks; ConfigError if policy.model describes another model."""
    assert policy.model_name is not None
    activity.advance(f"fetching {policy.model_name}")
    folder = fetched_folder(policy.model_name)
    # Checked again here: when the recipe was loaded, the model's config.json may have been out of reach.
    found = pretrained_model(str(folder), policy.hf_config_overrides)
    assert found is not None
    if problems := differences(policy.model, found, str(folder)):
        raise ConfigError(problem.below("policy") for problem in problems)
    stored = None if missing_family(policy.model) else family_of(policy.model).stored
    with TensorFiles(folder, stored) as files:
        load_weights(files, chunks, policy.model)


def load_weights(files: TensorFiles, chunks: Sequence[torch.nn.Module], model: ModelConfig) -> None:
    """Load this rank's chunks from the files, which must hold exactly the architecture's tensors."""
    _check_names(files, model)
    outside = outside_of_layers(model)
    stored_although_tied = model.tie_word_embeddings and not files.names.isdisjoint(
        outside.output.hugging_face
    )
    with torch.no_grad():
        for weight, parameter in local_parameters(chunks, model):
            activity.advance(f"loading {', '.join(weight.names)}")
            fill(parameter, _read(files, weight, model))
            # A sum needs one pass and no memory on the device, and keeps NaN and infinities.
            if not torch.isfinite(parameter.sum()):
                for name in weight.names:
                    files.require_finite(name)  # a sum may also overflow for finite weights
            if weight.slot is outside.embedding and stored_although_tied:
                output = _read(files, Weight(outside.output), model).to(parameter)
                if not torch.equal(output, parameter[: output.shape[0]]):
                    raise ValueError(
                        f"{outside.output.hugging_face[0]} differs from {outside.embedding.hugging_face[0]}, and "
                        "config.json says tie_word_embeddings: true; set it to false there"
                    )


def _check_names(files: TensorFiles, model: ModelConfig) -> None:
    # These are not loaded: computed tensors, and some families' prediction layers.
    predicting = None if missing_family(model) else family_of(model).predicting
    left_out = re.compile(_COMPUTED if predicting is None else f"{_COMPUTED}|{predicting(model)}")
    expected = {name for weight in all_weights(model) for name in weight.names}
    allowed = expected
    if model.tie_word_embeddings:
        allowed = expected | {*outside_of_layers(model).output.hugging_face}
    unexpected = sorted(
        name
        for name in files.names - allowed
        # Files of models without shared experts hold empty tensors for them.
        if not left_out.fullmatch(name) and 0 not in files.shape(name)
    )
    complaints = [
        f"{len(names)} {kind}: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        for kind, names in (("missing", sorted(expected - files.names)), ("unexpected", unexpected))
        if names
    ]
    if complaints:
        raise ValueError(f"the tensors are not those of the architecture; {'; '.join(complaints)}")


def _read(files: TensorFiles, weight: Weight, model: ModelConfig) -> torch.Tensor:
    for name in weight.names:
        _require_shape(name, files.shape(name), weight, model)
    expert = weight.expert if weight.slot.stacked else None  # its index in the tensor

    def read(number: int, cut: tuple[slice, ...]) -> torch.Tensor:
        if expert is None:
            return files.read(weight.names[number], cut)
        return files.read(weight.names[number], (slice(expert, expert + 1), *cut))[0]

    return own_part(weight, model, read)


def _require_shape(name: str, found: tuple[int, ...], weight: Weight, model: ModelConfig) -> None:
    shape = weight.slot.tensor_shapes(model)[weight.names.index(name)]
    if found != shape:
        raise ValueError(f"{name} has the shape {found}, and the architecture gives it {shape}")


def fill(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Set a parameter's first rows; the others are padding of the embedding, and set to 0."""
    rows = values.shape[0]
    assert values.shape[1:] == parameter.shape[1:]
    parameter[:rows].copy_(values)
    parameter[rows:].zero_()


class WholeWeightFilling:
    """Loads a model from whole Hugging Face tensors; a parameter is set once all its tensors have arrived."""

    def __init__(self, chunks: Sequence[torch.nn.Module], model: ModelConfig) -> None:
        self._model = model
        self._parameters = dict(local_parameters(chunks, model))
        self._weights_of: dict[str, list[Weight]] = defaultdict(list)
        for weight in self._parameters:
            for name in weight.names:
                self._weights_of[name].append(weight)
        self._missing = set(self._weights_of)
        self._parts: dict[Weight, dict[str, torch.Tensor]] = defaultdict(dict)

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Load a tensor, whose memory may be reused afterwards; ValueError for an unknown name or a wrong shape."""
        if name not in self._weights_of:
            raise ValueError(f"the model has no tensor {name}")
        weights = self._weights_of[name]
        _require_shape(name, tuple(tensor.shape), weights[0], self._model)
        self._missing.discard(name)
        for weight in weights:
            stacked = weight.slot.stacked and weight.expert is not None
            part = tensor[weight.expert] if stacked else tensor
            parts = self._parts[weight]
            parts[name] = part
            if len(parts) < len(weight.names):
                parts[name] = part.clone()
                continue
            del self._parts[weight]
            packed = pack(weight.slot.layout.packing, [parts[each] for each in weight.names], self._model)
            with torch.no_grad():
                fill(self._parameters[weight], packed)

    def missing(self) -> Sequence[str]:
        """Return the names of tensors that were not loaded yet."""
        return sorted(self._missing)
