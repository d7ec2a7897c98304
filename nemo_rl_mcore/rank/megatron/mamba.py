"""A Mamba-2 layer without Megatron's CUDA kernels, with the same parameters, sharding and checkpoint.

Megatron's mixer needs the packages mamba_ssm and causal_conv1d, which need a GPU. This one is slow, runs anywhere, and
is the reference that tests compare with transformers.

Shapes: S sequence, B rows, X channels of the input projection: gate z, values x, keys B, queries C, time steps dt.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import silu, softplus

from nemo_rl_mcore.config import MegatronConfig
from nemo_rl_mcore.config.model import MAMBA_NORM_EPSILON, MAMBA_TAPS
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.ops.state_space import ScanInputs, causal_convolution, selective_scan
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron.batching import sample_of_tokens
from nemo_rl_mcore.rank.megatron.context_parallel import (
    context_parallel_rank,
    context_parallel_size,
    gather_in_order,
    zigzag,
)
from nemo_rl_mcore.rank.megatron.layer_specs import norm_of, use_transformer_engine

# Ranges of upstream's initialisation.
_SHORTEST_STEP, _LONGEST_STEP = 1e-3, 0.1
_DECAYS = 1.0, 16.0


class ReferenceMambaLayer(MambaLayer):
    """Megatron's layer, which derives the samples of a packed row from the attention mask, for its mixer."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **keywords: Any,
    ) -> Tensor:
        """Return the hidden states [S, B, H]; `attention_mask` is [1, 1, S, S], true where masked."""
        if attention_mask is not None and packed_seq_params is None:
            # A position that does not see its predecessor is the first of its sample.
            first = attention_mask[0, 0].diagonal(-1).nonzero().flatten() + 1
            end = first.new_full((1,), attention_mask.shape[-1])
            borders = torch.cat([first.new_zeros(1), first, end])
            packed_seq_params = PackedSeqParams(cu_seqlens_q=borders)
        keywords["packed_seq_params"] = packed_seq_params
        return cast(Tensor, super().forward(hidden_states, attention_mask, *args, **keywords))


class ReferenceMambaMixer(MambaMixer):
    """Mamba-2 mixer; from upstream's class it inherits the description of parameters and the checkpoint format."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        d_model: int,
        *,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **_unused: Any,
    ):
        MegatronModule.__init__(self, config)  # upstream's constructor needs the kernels
        assert config.mamba_num_heads is not None
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        self.nheads, self.headdim = config.mamba_num_heads, config.mamba_head_dim
        self.ngroups, self.d_state = config.mamba_num_groups, config.mamba_state_dim
        self.d_inner = self.nheads * self.headdim
        ranks = self.tp_group.size()
        self.nheads_local_tp, self.ngroups_local_tp = self.nheads // ranks, self.ngroups // ranks
        self.d_inner_local_tp = self.d_inner // ranks
        common: Any = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            *(submodules.in_proj, d_model, sum(self._parts(1))),
            **common,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
        )
        # Each rank draws the parameters of all ranks, from upstream's distributions, and keeps its part.
        convolved, bound = self._parts(1)[1:4], 1 / math.sqrt(MAMBA_TAPS)
        self.conv1d_weight = self._part(
            torch.empty(sum(convolved), 1, MAMBA_TAPS).uniform_(-bound, bound), convolved
        )
        self.conv1d_bias = self._part(torch.empty(sum(convolved)).uniform_(-bound, bound), convolved)
        steps = torch.empty(self.nheads).uniform_(math.log(_SHORTEST_STEP), math.log(_LONGEST_STEP)).exp()
        before_softplus = steps + torch.log(-torch.expm1(-steps))
        self.dt_bias = self._part(before_softplus, (self.nheads,))
        self.A_log = self._part(torch.empty(self.nheads).uniform_(*_DECAYS).log(), (self.nheads,))
        self.D = self._part(torch.ones(self.nheads), (self.nheads,))
        scale = self._part(torch.ones(self.d_inner), (self.d_inner,))
        self.norm = GatedNorm(scale, self.ngroups_local_tp, self.tp_group)
        self.out_proj = build_module(
            *(submodules.out_proj, self.d_inner, d_model),
            **common,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
        )

    def _parts(self, ranks: int | None = None) -> tuple[int, int, int, int, int]:
        """Return the number of rows of z, x, B, C and dt, on this rank or over all."""
        ranks = ranks or self.tp_group.size()
        inner, keys = self.d_inner // ranks, self.ngroups * self.d_state // ranks
        return inner, inner, keys, keys, self.nheads // ranks

    def _part(self, whole: Tensor, sections: Sequence[int]) -> Parameter:
        ranks, rank = self.tp_group.size(), self.tp_group.rank()
        own = torch.cat([section.chunk(ranks)[rank] for section in whole.split(list(sections))])
        parameter = Parameter(own.to(accelerator.device(), self.config.params_dtype))
        parameter.tensor_model_parallel, parameter.partition_dim = True, 0  # type: ignore[attr-defined]
        return parameter

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Map [S, B, H] to [S, B, H], and no bias; S is a rank's part under sequence and context parallelism.

        inference_context: holds the states of the sequences so far; hidden_states then has only the new tokens.
        """
        ranks, borders = context_parallel_size(), ()
        if packed_seq_params is not None:
            borders = tuple(packed_seq_params.cu_seqlens_q.tolist())
        projected_SBX, _ = self.in_proj(hidden_states)
        if ranks > 1:
            projected_SBX = gather_in_order(projected_SBX, borders, grad_of_every_rank_is_whole=False)
        samples_S = sample_of_tokens(borders) if borders else None
        mixed_BSD = self._mix(projected_SBX.transpose(0, 1), samples_S, inference_context)
        mixed_SBD = mixed_BSD.transpose(0, 1)
        if ranks > 1:
            own = zigzag(borders or (0, len(mixed_SBD)), ranks)[context_parallel_rank()]
            mixed_SBD = mixed_SBD.index_select(0, own.to(mixed_SBD.device))
        return self.out_proj(mixed_SBD.contiguous())

    def _mix(self, projected_BSX: Tensor, samples_S: Tensor | None, context: Any) -> Tensor:
        """Return the input of the output projection, [B, S, heads of this rank * P]."""
        inner, _, keys, _, heads = self._parts()
        gate, convolved, steps = projected_BSX.split([inner, inner + 2 * keys, heads], dim=-1)
        precision = torch.promote_types(convolved.dtype, torch.float32)
        rows = len(projected_BSX)
        # The last values [B, W - 1, C] and the state [B, H, P, N] before these tokens: those of a decoding session, or
        # zeros. A session keeps them like keys and values, rows in the second dimension, so that it can reorder them.
        if context is not None and context.sequence_len_offset:
            kept = context.key_value_memory_dict[self.layer_number]
            before, state = (x[:, :rows] for x in kept)
            before_BWC, state_BHPN = before.transpose(0, 1), state[0]
        else:
            before_BWC = convolved.new_zeros(rows, MAMBA_TAPS - 1, inner + 2 * keys)
            state_BHPN = convolved.new_zeros(rows, heads, self.headdim, self.d_state, dtype=precision)
        convolution = causal_convolution(
            *(convolved, self.conv1d_weight.squeeze(1), self.conv1d_bias),
            samples_S=samples_S,
            before_BWC=before_BWC,
        )
        groups = self.ngroups_local_tp
        x, b, c = (
            part.unflatten(-1, (number, -1)).to(precision)
            for part, number in zip(
                silu(convolution).split([inner, keys, keys], dim=-1), (heads, groups, groups), strict=True
            )
        )
        steps_BSH = softplus(steps.to(precision) + self.dt_bias.to(precision))
        log_decays = -self.A_log.to(precision).exp() * steps_BSH
        read, state_BHPN = selective_scan(
            ScanInputs(x * steps_BSH.unsqueeze(-1), log_decays, b, c, samples_S), state_BHPN
        )
        if context is not None:
            last_BWC = torch.cat([before_BWC, convolved], dim=1)[:, -before_BWC.shape[1] :]
            parts = last_BWC.transpose(0, 1), state_BHPN.unsqueeze(0)
            room = tuple(x.new_zeros(x.shape[0], context.max_batch_size, *x.shape[2:]) for x in parts)
            for whole, part in zip(room, parts, strict=True):
                whole[:, :rows] = part
            context.key_value_memory_dict[self.layer_number] = room
        mixed = (read + x * self.D.to(precision).unsqueeze(-1)).flatten(2).to(gate.dtype)
        return self.norm(mixed, gate)

    def train(self, mode: bool = True) -> ReferenceMambaMixer:
        """As `torch.nn.Module.train`; upstream's override clears a cache that does not exist here."""
        torch.nn.Module.train(self, mode)
        return self


class GatedNorm(torch.nn.Module):
    """Gated root-mean-square norm over each group of channels."""

    def __init__(self, weight: Parameter, groups: int, tensor_parallel: torch.distributed.ProcessGroup):
        super().__init__()
        self.weight, self.groups, self.tp_group = weight, groups, tensor_parallel

    def forward(self, values: Tensor, gate: Tensor) -> Tensor:
        precision = torch.promote_types(values.dtype, torch.float32)
        let_through = values.to(precision) * silu(gate.to(precision))
        grouped = let_through.unflatten(-1, (self.groups, -1))
        normed = torch.nn.functional.rms_norm(grouped, grouped.shape[-1:], eps=MAMBA_NORM_EPSILON)
        return (normed.flatten(-2) * self.weight.to(precision)).to(values.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint(
            *(self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets),
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


_KERNELS = ("mamba_ssm", "causal_conv1d", "einops")


def mamba_layer_spec(config: MegatronConfig) -> ModuleSpec:
    """Return a layer's spec; RefusedError on GPUs without the kernels' packages, or with local layers' masks."""
    # Upstream's annotation names no functions, and hybrid_layer_specs.py gives it this one.
    add = cast(type, get_bias_dropout_add)
    if not accelerator.has_cuda():
        local = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
        return ModuleSpec(
            module=ReferenceMambaLayer,
            submodules=MambaLayerSubmodules(
                norm=norm_of(config),
                mixer=ModuleSpec(module=ReferenceMambaMixer, submodules=local),
                mamba_bda=add,
                # Transformer Engine fuses the norm into the projection.
                sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
            ),
        )
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
    mixer = ModuleSpec(module=MambaMixer, submodules=projections)
    return ModuleSpec(module=MambaLayer, submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=add))
