"""Mamba-2 layers and gated delta nets without Megatron's CUDA kernels.

Upstream's layers need a GPU and the packages mamba_ssm and causal_conv1d, or fla. These are slow, but run anywhere, and
have the same parameters, sharding and checkpoint.

Shapes: S sequence, B batch, H hidden, X channels of the input projection, C convolved channels, D heads' channels,
W taps of the convolution, P size of a value, N size of a key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import silu, softplus

from nemo_rl_mcore.config.model import MAMBA_NORM_EPSILON, MAMBA_TAPS
from nemo_rl_mcore.ops.state_space import ScanInputs, causal_convolution, selective_scan
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.batching import gather_in_order, sample_of_tokens, zigzag

# Ranges of upstream's initialisation.
_SHORTEST_STEP, _LONGEST_STEP = 1e-3, 0.1
_DECAYS = 1.0, 16.0
_NORM_EPSILON = 1e-6
"""Added to the squared length of a gated delta net's queries and keys (fla, l2norm)."""


def _samples_of(attention_mask: Tensor | None, packed: PackedSeqParams | None) -> PackedSeqParams | None:
    """Return a packed row's sample boundaries; local layers get a mask [1, 1, S, S], true where masked."""
    if attention_mask is None or packed is not None:
        return packed
    # A position that cannot see the one before it is the first of its sample.
    first = attention_mask[0, 0].diagonal(-1).nonzero().flatten() + 1
    end = first.new_full((1,), attention_mask.shape[-1])
    return PackedSeqParams(cu_seqlens_q=torch.cat([first.new_zeros(1), first, end]))


class _Recurrent(MegatronModule):
    """A layer's parameters, drawn alike on all layouts, its passes over whole sequences, and a session's states."""

    layer_number: int
    tp_group: torch.distributed.ProcessGroup
    in_proj: Any
    out_proj: Any

    def _build_projections(self, submodules: Any, hidden: int, projected: int, inner: int) -> None:
        config = self.config
        common: Any = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            *(submodules.in_proj, hidden, projected),
            **common,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
        )
        self.out_proj = build_module(
            *(submodules.out_proj, inner, hidden),
            **common,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
        )

    def _part(self, whole: Tensor, sections: Sequence[int]) -> Parameter:
        """Return this rank's share of each section of a parameter, which each rank draws whole."""
        ranks, rank = self.tp_group.size(), self.tp_group.rank()
        own = torch.cat([section.chunk(ranks)[rank] for section in whole.split(list(sections))])
        parameter = Parameter(own.to(accelerator.device(), self.config.params_dtype))
        parameter.tensor_model_parallel, parameter.partition_dim = True, 0  # type: ignore[attr-defined]
        return parameter

    def _over_sequences(
        self, hidden_SBH: Tensor, packed: PackedSeqParams | None, context: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map [S, B, H] to [S, B, H], and no bias; S is a rank's part under sequence and context parallelism.

        context: the sequences' states so far; if given, hidden_SBH has only the new tokens.
        """
        ranks = parallel_groups.group("context")
        borders = () if packed is None else tuple(packed.cu_seqlens_q.tolist())
        projected_SBX, _ = self.in_proj(hidden_SBH)
        if ranks.size() > 1:
            projected_SBX = gather_in_order(projected_SBX, borders, grad_of_every_rank_is_whole=False)
        samples_S = sample_of_tokens(borders) if borders else None
        mixed_SBD = self._mix(projected_SBX.transpose(0, 1), samples_S, context).transpose(0, 1)
        if ranks.size() > 1:
            own = zigzag(borders or (0, len(mixed_SBD)), ranks.size())[ranks.rank()]
            mixed_SBD = mixed_SBD.index_select(0, own.to(mixed_SBD.device))
        return self.out_proj(mixed_SBD.contiguous())

    def _mix(self, projected_BSX: Tensor, samples_S: Tensor | None, context: Any) -> Tensor:
        """Return the input of the output projection, [B, S, D]."""
        raise NotImplementedError

    def _before(
        self, context: Any, convolved_BSC: Tensor, state: tuple[int, int, int]
    ) -> tuple[Tensor, Tensor]:
        """Return the last values [B, W - 1, C] and the state [B, H, P, N] of a session, or zeros."""
        rows = len(convolved_BSC)
        if context is not None and context.sequence_len_offset:
            kept = context.key_value_memory_dict[self.layer_number]
            values_WBC, state_1BHPN = (x[:, :rows] for x in kept)
            return values_WBC.transpose(0, 1), state_1BHPN[0]
        precision = torch.promote_types(convolved_BSC.dtype, torch.float32)
        before_BWC = convolved_BSC.new_zeros(rows, MAMBA_TAPS - 1, convolved_BSC.shape[-1])
        return before_BWC, convolved_BSC.new_zeros(rows, *state, dtype=precision)

    def _keep(self, context: Any, before_BWC: Tensor, convolved_BSC: Tensor, state_BHPN: Tensor) -> None:
        """Store the last values and state like keys and values, rows second, so that a session can reorder them."""
        if context is None:
            return
        last_BWC = torch.cat([before_BWC, convolved_BSC], dim=1)[:, -before_BWC.shape[1] :]
        parts = last_BWC.transpose(0, 1), state_BHPN.unsqueeze(0)
        room = tuple(x.new_zeros(x.shape[0], context.max_batch_size, *x.shape[2:]) for x in parts)
        for whole, part in zip(room, parts, strict=True):
            whole[:, : len(convolved_BSC)] = part
        context.key_value_memory_dict[self.layer_number] = room


class ReferenceMambaLayer(MambaLayer):
    """Megatron's layer, except that a packed row's samples come from the attention mask."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **keywords: Any,
    ) -> Tensor:
        """Return the hidden states [S, B, H]; `attention_mask` is [1, 1, S, S], true where masked."""
        keywords["packed_seq_params"] = _samples_of(attention_mask, packed_seq_params)
        return cast(Tensor, super().forward(hidden_states, attention_mask, *args, **keywords))


class ReferenceMambaMixer(_Recurrent, MambaMixer):
    """Mamba-2 mixer; inherits the parameters' description and the checkpoint format from upstream's class.

    X: gate z, values x, keys B, queries C, dt.
    """

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
        self._build_projections(submodules, d_model, sum(self._parts(1)), self.d_inner)
        # Each rank draws all ranks' parameters, from upstream's distributions, and keeps its part.
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

    def _parts(self, ranks: int | None = None) -> tuple[int, int, int, int, int]:
        """Return the numbers of rows in z, x, B, C and dt, on this rank or over all ranks."""
        ranks = ranks or self.tp_group.size()
        inner, keys = self.d_inner // ranks, self.ngroups * self.d_state // ranks
        return inner, inner, keys, keys, self.nheads // ranks

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return self._over_sequences(hidden_states, packed_seq_params, inference_context)

    def _mix(self, projected_BSX: Tensor, samples_S: Tensor | None, context: Any) -> Tensor:
        inner, _, keys, _, heads = self._parts()
        gate, convolved, steps = projected_BSX.split([inner, inner + 2 * keys, heads], dim=-1)
        precision = torch.promote_types(convolved.dtype, torch.float32)
        before_BWC, state_BHPN = self._before(context, convolved, (heads, self.headdim, self.d_state))
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
        self._keep(context, before_BWC, convolved, state_BHPN)
        mixed = (read + x * self.D.to(precision).unsqueeze(-1)).flatten(2).to(gate.dtype)
        return self.norm(mixed, gate)

    train = cast(Any, torch.nn.Module.train)  # upstream's override clears a cache that does not exist here


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


class ReferenceDeltaNet(_Recurrent, GatedDeltaNet):
    """Gated delta net; inherits the checkpoint format from upstream's class.

    X: queries, keys, values, gate, strengths, decays.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        *,
        pg_collection: ProcessGroupCollection,
        **_unused: Any,
    ):
        MegatronModule.__init__(self, config)  # upstream's constructor needs the kernels
        self.layer_number, self.tp_group, self.pg_collection = layer_number, pg_collection.tp, pg_collection
        self.tp_size, self.conv_bias = self.tp_group.size(), False
        heads = cast(int, config.linear_num_value_heads)
        self.qk_dim = cast(int, config.linear_num_key_heads) * cast(int, config.linear_key_head_dim)
        self.v_dim = heads * cast(int, config.linear_value_head_dim)
        self.qk_dim_local_tp, self.v_dim_local_tp = self.qk_dim // self.tp_size, self.v_dim // self.tp_size
        convolved = (self.qk_dim, self.qk_dim, self.v_dim)
        self.conv_dim_local_tp = sum(convolved) // self.tp_size
        self.in_proj_split_names = ["query", "key", "value", "z", "beta", "alpha"]
        rows = (*convolved, self.v_dim, heads, heads)
        self.in_proj_split_sections = tuple(size // self.tp_size for size in rows)
        self.in_proj_dim = sum(rows)
        self._build_projections(submodules, config.hidden_size, self.in_proj_dim, self.v_dim)
        bound, channels = 1 / math.sqrt(MAMBA_TAPS), self.conv_dim_local_tp
        self.conv1d = torch.nn.Conv1d(channels, channels, MAMBA_TAPS, groups=channels, bias=False)
        drawn = torch.empty(sum(convolved), 1, MAMBA_TAPS).uniform_(-bound, bound)
        self.conv1d.weight = self._part(drawn, convolved)
        self.dt_bias = self._part(torch.ones(heads), (heads,))
        self.A_log = self._part(torch.empty(heads).uniform_(*_DECAYS).log(), (heads,))
        size, epsilon = config.linear_value_head_dim, config.layernorm_epsilon
        self.out_norm = build_module(submodules.out_norm, config=config, hidden_size=size, eps=epsilon)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        *_others: Any,
        **_unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        packed = _samples_of(attention_mask, packed_seq_params)
        return self._over_sequences(hidden_states, packed, inference_context)

    def _mix(self, projected_BSX: Tensor, samples_S: Tensor | None, context: Any) -> Tensor:
        keys, _, values, _, heads, _ = self.in_proj_split_sections
        convolved, gate, strengths, decays = projected_BSX.split(
            [2 * keys + values, values, heads, heads], dim=-1
        )
        precision = torch.promote_types(convolved.dtype, torch.float32)
        size, value_size = cast(int, self.config.linear_key_head_dim), values // heads
        before_BWC, state_BHPN = self._before(context, convolved, (heads, value_size, size))
        weight_CW = self.conv1d.weight.squeeze(1)
        convolution = causal_convolution(
            *(convolved, weight_CW, weight_CW.new_zeros(())), samples_S=samples_S, before_BWC=before_BWC
        )
        q, k, v = (
            part.unflatten(-1, (-1, of_head)).to(precision)
            for part, of_head in zip(
                silu(convolution).split([keys, keys, values], dim=-1), (size, size, value_size), strict=True
            )
        )
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPSILON) for x in (q, k))
        steps_BSH = softplus(decays.to(precision) + self.dt_bias.to(precision))
        log_decays = -self.A_log.to(precision).exp() * steps_BSH
        written = ScanInputs(
            v, log_decays, k, q / math.sqrt(size), samples_S, strengths.sigmoid().to(precision)
        )
        read, state_BHPN = selective_scan(written, state_BHPN)
        self._keep(context, before_BWC, convolved, state_BHPN)
        normed = self.out_norm(read.to(gate.dtype)).flatten(2)
        return (normed * silu(gate.to(precision))).to(gate.dtype)
