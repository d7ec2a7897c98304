"""Load the weights of a Hugging Face folder: each rank reads its own part of each tensor, one tensor at a time.

A process that holds the whole model also receives tensors one by one, in any order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from nemo_rl_mcore.config import ConfigError, ModelConfig, PolicyConfig
from nemo_rl_mcore.data.hub import fetched_folder
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.models import all_weights, family_of, missing_family, outside_of_layers
from nemo_rl_mcore.models.pretrained import differences, pretrained_model
from nemo_rl_mcore.models.weights import Weight
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.megatron.hf_weights.files import TensorFiles
from nemo_rl_mcore.rank.megatron.hf_weights.packing import pack
from nemo_rl_mcore.rank.megatron.hf_weights.placement import Place, local_parameters, this_place

# Old checkpoints hold what is computed from the config.
_COMPUTED = r".+\.rotary_emb\.inv_freq"
_SHOWN = 8


def load_pretrained(policy: PolicyConfig, chunks: Sequence[torch.nn.Module]) -> None:
    """Fill this rank's chunks with the weights of `policy.model_name`, fetched from the hub if need be.

    Raises ValueError when config.json, the tensors' names or their shapes are not those of policy.model.
    """
    assert policy.model_name is not None
    activity.advance(f"fetching {policy.model_name}")
    folder = fetched_folder(policy.model_name)
    _check_architecture(policy, folder)
    with TensorFiles(folder) as files:
        load_weights(files, chunks, policy.model)


def load_weights(files: TensorFiles, chunks: Sequence[torch.nn.Module], model: ModelConfig) -> None:
    """Fill this rank's chunks from the files, which must hold the tensors of that architecture and no others."""
    _check_names(files, model)
    place = this_place()
    with torch.no_grad():
        for weight, parameter in local_parameters(chunks, model, place):
            activity.advance(f"loading {', '.join(weight.names)}")
            fill(parameter, _read(files, weight, place, model))
            # A sum takes one pass where the weights are, and no memory; NaN and infinities are left of it.
            if not torch.isfinite(parameter.sum()):
                _require_finite(files, weight)
            if weight.slot is outside_of_layers(model).embedding and model.tie_word_embeddings:
                _check_tied_output(files, place, model, parameter)


def _require_finite(files: TensorFiles, weight: Weight) -> None:
    """Name the tensor of a weight that holds what is no number; finite ones may have a sum that is too large."""
    for name in weight.names:
        values = files.read(name, (slice(None),) * len(files.shape(name)))
        wrong = values[~torch.isfinite(values)]
        if len(wrong):
            raise RefusedError(
                f"{str(files.path_of(name))!r}: {name} holds {float(wrong[0])}; {len(wrong)} of its "
                f"{values.numel()} weights are not finite; fetch or export the model again",
                code="not-finite-weights",
            )


def _check_architecture(policy: PolicyConfig, folder: Path) -> None:
    """Check again on the rank: the recipe may have been checked against a table of known models, or nothing."""
    found = pretrained_model(str(folder), policy.hf_config_overrides)
    assert found is not None
    if problems := differences(policy.model, found, str(folder)):
        raise ConfigError(problem.below("policy") for problem in problems)


def _check_names(files: TensorFiles, model: ModelConfig) -> None:
    found, left_out = files.names, _left_out(model)
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


def _left_out(model: ModelConfig) -> re.Pattern[str]:
    """Return the names of tensors that are not loaded: of prediction layers, where the family's files have some."""
    predicting = None if missing_family(model) else family_of(model).predicting
    return re.compile(_COMPUTED if predicting is None else f"{_COMPUTED}|{predicting(model)}")


def _read(files: TensorFiles, weight: Weight, place: Place, model: ModelConfig) -> torch.Tensor:
    """Read the part of a weight that this rank holds, as its parameter has it."""
    shapes, layout = weight.slot.shapes(model), weight.slot.layout
    for name, shape in zip(weight.names, weight.slot.tensor_shapes(model), strict=True):
        if files.shape(name) != shape:
            raise ValueError(
                f"{name} has the shape {files.shape(name)}, and the architecture gives it {shape}"
            )
    rank, ranks = place.shard_of(weight)
    parts: list[torch.Tensor] = []
    for name, shape in zip(weight.names, shapes, strict=True):
        cuts = [_cut(files, name, weight, cut) for cut in layout.cuts(shape, rank, ranks, model)]
        parts.append(cuts[0] if len(cuts) == 1 else torch.cat(cuts, layout.dimension or 0))
    return pack(layout.packing, parts, model)


def _cut(files: TensorFiles, name: str, weight: Weight, cut: tuple[slice, ...]) -> torch.Tensor:
    """Read a part of a weight's tensor, or of what a tensor of all experts has of one."""
    if not weight.slot.stacked or weight.expert is None:
        return files.read(name, cut)
    return files.read(name, (slice(weight.expert, weight.expert + 1), *cut))[0]


def fill(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Set a parameter of which the values are the rows that tokens have."""
    rows = values.shape[0]
    assert values.shape[1:] == parameter.shape[1:]
    assert rows <= parameter.shape[0]
    parameter[:rows].copy_(values)
    parameter[rows:].zero_()  # rows that fill the embedding up, and are no tokens


def _check_tied_output(files: TensorFiles, place: Place, model: ModelConfig, embedding: torch.Tensor) -> None:
    """Compare an output layer that is stored although it is tied: it must repeat the embedding."""
    outside = outside_of_layers(model)
    if files.names.isdisjoint(outside.output.hugging_face):
        return
    output = _read(files, Weight(outside.output), place, model).to(embedding)
    if not torch.equal(output, embedding[: output.shape[0]]):
        raise ValueError(
            f"{outside.output.hugging_face[0]} differs from {outside.embedding.hugging_face[0]}, and config.json says "
            "tie_word_embeddings: true; set it to false there"
        )


class WholeWeightFilling:
    """Implements `rank.policy_backend.WeightFilling`: a parameter is set once all its tensors are there."""

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
        """See `WeightFilling.take`."""
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
            self._take(weight, name, tensor[weight.expert] if stacked else tensor)

    def _take(self, weight: Weight, name: str, tensor: torch.Tensor) -> None:
        parts = self._parts.setdefault(weight, {})
        parts[name] = tensor
        if len(parts) < len(weight.names):
            parts[name] = tensor.clone()
            return
        del self._parts[weight]
        packed = pack(weight.slot.layout.packing, [parts[each] for each in weight.names], self._model)
        with torch.no_grad():
            fill(self._parameters[weight], packed)

    def missing(self) -> Sequence[str]:
        """See `WeightFilling.missing`."""
        return sorted(self._missing)
