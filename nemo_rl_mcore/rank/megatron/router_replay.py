"""Router replay: later passes send each token to the experts that an earlier pass, or an engine, chose for it.

The routes are a column of the batch, `routed_experts`; a rank's routers get the part for their own layers and tokens.
Megatron's own `RouterReplay` is not used: it replays whole microbatches, while a token without a route (padding, a
response's last token) must be routed as usual, and it replays recomputed layers from a queue that an aborted step would
leave behind. Routers take any object with its method.

Shapes: B rows of a microbatch, S their columns, C columns of the model on this rank, L MoE layers, K experts
per token, N tokens of a router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import NO_ROUTE, ROUTED_EXPERTS
from nemo_rl_mcore.data.microbatch import Microbatch, in_batch_order
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.batching import own_columns
from nemo_rl_mcore.rank.megatron.model_class import modules_of


@dataclass
class _Choice:
    """A router's choice of experts; target: integers [N, K], negative for tokens to be routed as usual."""

    target: torch.Tensor | None = None
    chosen: torch.Tensor | None = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of a token's experts and the experts [N, K]; called by the router with its own choice."""
        found, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.target is not None:
            routed = (self.target >= 0).all(1, keepdim=True)
            chosen = torch.where(routed, self.target.to(chosen), chosen)
            found = scores.gather(1, chosen)
        self.chosen = chosen
        return found, chosen


type Recording = dict[int, tuple[Microbatch, dict[int, torch.Tensor]]]
"""A pass's routes on this rank: for each microbatch, in order, those of the rank's layers, int16 [N, K]."""


class RoutedExperts:
    """Records and replays the routes of a rank's layers; prediction layers, which only train, are routed as usual."""

    def __init__(self, policy: PolicyConfig, config: TransformerConfig, chunks: Sequence[torch.nn.Module]):
        self._config, self._model = config, policy.model
        # Indexed by model chunk, then by the layer's place among the MoE layers.
        self._choices: dict[int, dict[int, _Choice]] = {}
        for chunk in chunks:
            choices = self._choices[id(chunk)] = dict[int, _Choice]()
            for router in modules_of(TopKRouter, [chunk]):
                if not router.is_mtp_layer:
                    assert router.layer_number is not None
                    layer = (router.layer_number - 1) // policy.parts_of_a_layer
                    choice = choices[policy.model.expert_layers.index(layer)] = _Choice()
                    router.router_replay = choice  # pyright: ignore[reportAttributeAccessIssue]
        self._layers = [layer for choices in self._choices.values() for layer in choices]

    def of_own_layers(self, data: BatchedDataDict) -> BatchedDataDict:
        """Return the batch without other ranks' layers, since all its microbatches are moved to the device."""
        if ROUTED_EXPERTS not in data:
            return data
        return BatchedDataDict(data | {ROUTED_EXPERTS: data[ROUTED_EXPERTS][:, :, self._layers]})

    def run[Output: torch.Tensor | tuple[torch.Tensor, ...]](
        self,
        chunk: torch.nn.Module,
        microbatch: Microbatch,
        recording: Recording | None,
        forward: Callable[[], Output],
    ) -> Output:
        """Run a chunk forward with the microbatch's routes, if it has any.

        Recomputed layers get them again: the output's gradient sets them before the layers' backward pass, as other
        microbatches may have run forward in between.
        """
        choices = self._choices[id(chunk)]
        targets: Sequence[torch.Tensor | None] = [None] * len(choices)
        if ROUTED_EXPERTS in microbatch.rows:
            own = [self._layers.index(layer) for layer in choices]
            routes = microbatch.to_model(microbatch.rows[ROUTED_EXPERTS][:, :, own])
            routes = routes.masked_fill(microbatch.padding[:, :, None, None], NO_ROUTE)
            # A router's tokens are in the order of positions, then rows.
            targets = own_columns(self._config, routes).transpose(0, 1).flatten(0, 1).unbind(1)

        def begin(_gradient: torch.Tensor | None = None) -> None:
            for choice, target in zip(choices.values(), targets, strict=True):
                choice.target = target

        begin()
        output = forward()
        for tensor in output if isinstance(output, tuple) else (output,):
            if tensor.requires_grad:
                tensor.register_hook(begin)
        if recording is not None:
            _, of_layers = recording.setdefault(id(microbatch), (microbatch, {}))
            for layer, choice in choices.items():
                assert choice.chosen is not None
                of_layers[layer] = choice.chosen.short()
        return output

    def of_last_pass(self, rows: int) -> torch.Tensor:
        """Return the routes of a pass through all layers on this rank, [rows, tokens of each, L, K]."""
        chosen = [choice.chosen for choices in self._choices.values() for choice in choices.values()]
        routes_NLK = torch.stack([one for one in chosen if one is not None], dim=1)
        found = routes_NLK.unflatten(0, (-1, rows)).transpose(0, 1)
        return found.to(getattr(torch, self._model.route_dtype))

    def clear(self) -> None:
        """Route all tokens as usual again."""
        for choices in self._choices.values():
            for choice in choices.values():
                choice.target = choice.chosen = None

    def gathered(self, recording: Recording, rows: int, columns: int) -> torch.Tensor:
        """Return a pass's routes, [rows, columns, L, K] on the CPU; collective over the ranks of a model copy."""
        config, layers = self._config, len(self._model.expert_layers)
        kinds: list[parallel_groups.Group] = ["pipeline"]
        if config.sequence_parallel:
            kinds.append("tensor")
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for microbatch, of_layers in recording.values():
            ids_BC = microbatch.input_ids
            whole = ids_BC.new_zeros(*ids_BC.shape, layers, self._model.moe_router_topk, dtype=torch.int32)
            own = own_columns(config, whole)
            for layer, route_NK in of_layers.items():
                own[:, :, layer] = route_NK.unflatten(0, (-1, len(ids_BC))).transpose(0, 1).int()
            for kind in kinds:  # each rank has zeros for the others' layers and columns
                dist.all_reduce(whole, group=parallel_groups.group(kind))
            parts.append((microbatch.places, microbatch.from_model(whole)))
        found = in_batch_order(parts, rows, columns)
        return found.to(getattr(torch, self._model.route_dtype)).cpu()
