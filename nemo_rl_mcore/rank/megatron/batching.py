"""Microbatches, their attention inputs, and context parallelism, which divides each sequence among ranks.

A sequence is cut into 2 CP slices of equal length, and rank r has slices r and 2 CP - 1 - r (zigzag), so that causal
attention, whose cost grows along the sequence, is the same work on each rank. Megatron's rotary embedding and
Transformer Engine's attention expect this layout; each sample of a packed row is cut on its own.

Losses need whole sequences: `ContextParallelMicrobatch` gives the model a rank's tokens, and gathers the outputs. Each
rank computes the loss of whole rows, and backpropagates only its own tokens' gradient. A weight's gradients are summed
over the data-parallel group, which includes the context ranks.

Shapes: B rows, L columns of a row of the model, CP ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Self

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_mcore.config.policy import TokenBudgets
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import EPISODE
from nemo_rl_mcore.data.microbatch import (
    DynamicRows,
    FixedRows,
    Microbatch,
    PackedRows,
    TokenBudget,
    round_up,
)
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron import parallel_groups


@dataclass(frozen=True)
class ContextParallelMicrobatch(Microbatch):
    """A rank's part of the microbatch `shared`; positions: int64 [L / CP], the columns of each row that it holds."""

    shared: Microbatch
    positions: Tensor

    @property
    def whole(self) -> Microbatch:
        return self.shared

    @property
    def borders(self) -> tuple[int, ...]:
        return self.whole.borders

    def to_model(self, values_BS: Tensor) -> Tensor:
        """Cut [B, S, ...] to this rank's [B, L / CP, ...]."""
        return self.whole.to_model(values_BS).index_select(1, self.positions)

    def from_model(self, values: Tensor) -> Tensor:
        """Gather [B, L / CP, ...] to [B, S, ...]; only the gradient of a rank's own tokens flows back."""
        # Every rank computes the whole loss, so gradients are complete and must not be summed over the ranks.
        gathered = gather_in_order(
            values.transpose(0, 1), self.whole.borders, grad_of_every_rank_is_whole=True
        )
        return self.whole.from_model(gathered.transpose(0, 1))

    def to(self, device: torch.device) -> Self:
        whole = self.whole.to(device)
        return replace(
            self, rows=whole.rows, places=whole.places, shared=whole, positions=self.positions.to(device)
        )


def gather_in_order(local: Tensor, borders: Sequence[int], *, grad_of_every_rank_is_whole: bool) -> Tensor:
    """Gather the ranks' parts [L / CP, ...] of a sequence to [L, ...] in order; borders: between packed samples.

    grad_of_every_rank_is_whole: each rank's incoming gradient is complete, and it keeps its own part; otherwise the
    ranks' gradients are partial, and are summed.
    """
    ranks = parallel_groups.group("context")
    gathered: Tensor = gather_from_sequence_parallel_region(
        local.contiguous(),
        tensor_parallel_output_grad=not grad_of_every_rank_is_whole,
        group=ranks,
    )
    order = zigzag(tuple(borders) or (0, len(gathered)), ranks.size()).flatten()
    return gathered.index_select(0, order.argsort().to(local.device))


@lru_cache(maxsize=64)
def zigzag(borders: tuple[int, ...], ranks: int) -> Tensor:
    """Return each rank's positions in a row, int64 [CP, L / CP]; ValueError if a sample cannot be split evenly."""
    if ranks == 1:
        return torch.arange(borders[-1]).unsqueeze(0)
    parts: list[Tensor] = []
    for start, end in pairwise(borders):
        if (end - start) % (2 * ranks):
            raise ValueError(f"a sample of {end - start} tokens cannot be cut evenly into {2 * ranks} slices")
        slices = torch.arange(start, end).view(2 * ranks, -1)
        parts.append(torch.cat([slices[:ranks], slices.flip(0)[:ranks]], dim=1))
    return torch.cat(parts, dim=1)


def own_columns(config: TransformerConfig, values_BC: Tensor) -> Tensor:
    """Return this rank's columns of [B, C, ...] under sequence parallelism; otherwise all columns."""
    if not config.sequence_parallel:
        return values_BC
    ranks = parallel_groups.group("tensor")
    return values_BC.chunk(ranks.size(), dim=1)[ranks.rank()]


def column_multiple(config: TransformerConfig, slices: int) -> int:
    """Return the number that divides padded lengths: ranks that share a sequence have equal parts of it.

    With FP8, each part is padded, as in NeMo RL, to a number of tokens that Transformer Engine can multiply.
    """
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    tokens = {"blockwise": 128, "mxfp8": 32}.get(config.fp8_recipe or "", 16) if config.fp8 else 1
    return tokens * parts * slices


@dataclass(frozen=True)
class Batching:
    """Splits this rank's rows into microbatches, on the CPU.

    column_multiple: divides padded lengths and, under context parallelism, sample lengths in a packed row. slices:
    number of equal slices of a sample. budgets: a microbatch's token budgets; None for a fixed number of rows.
    """

    config: TransformerConfig
    column_multiple: int
    slices: int
    budgets: TokenBudgets | None = None

    def microbatches(
        self, data: BatchedDataDict, micro_batch_size: int, rows_per_sample: int | None
    ) -> list[Microbatch]:
        """Return the microbatches of one schedule call; rows_per_sample: the loss's; None for a pass without a loss."""
        config, budgets, rows = self.config, self.budgets, rows_per_sample or 1
        if rows_per_sample is None:
            data = data.without(EPISODE)
        strategy = FixedRows(micro_batch_size, self.column_multiple, rows)
        if budgets is not None:
            tokens = budgets.logprob if rows_per_sample is None else budgets.of_training(rows)
            budget = TokenBudget(tokens, budgets.length_round, self.column_multiple)
            strategy = DynamicRows(budget, rows)
            if budgets.packed:
                pipelined = config.pipeline_model_parallel_size > 1
                strategy = PackedRows(budget, pipelined, rows, row_multiple=self.slices)
        groups = strategy.groups(data)
        calls = max(len(groups), 1)  # a rank without rows still runs the model once
        # Ranks that exchange tokens in each forward pass need the same number of passes.
        calls = parallel_groups.largest_of_expert_ranks(calls, config)
        if config.virtual_pipeline_model_parallel_size is not None:
            calls = round_up(calls, config.pipeline_model_parallel_size)
        built = strategy.build(data, groups + [[]] * (calls - len(groups)))
        if config.context_parallel_size == 1:
            return built
        ranks, shared = parallel_groups.group("context"), list[Microbatch]()
        for whole in built:
            own = zigzag(whole.borders or (0, whole.input_ids.shape[1]), ranks.size())[ranks.rank()]
            shared.append(ContextParallelMicrobatch(whole.rows, whole.places, whole, own))
        return shared


def attention_inputs(microbatch: Microbatch, config: TransformerConfig) -> dict[str, Any]:
    """Return GPTModel's keywords that restrict attention to each token's sample; rows of one sample need no mask."""
    borders = microbatch.borders
    if not borders:
        return {"attention_mask": None}
    if config.transformer_impl != "transformer_engine" and config.context_parallel_size == 1:
        # Bool [1, 1, L, L], true where masked: other samples and the future. Rotary embeddings depend on relative
        # positions only, so a sample's offset in the row has no effect.
        sample_L = sample_of_tokens(borders)
        visible_LL = (sample_L.unsqueeze(1) == sample_L).tril()
        return {"attention_mask": ~visible_LL[None, None]}
    # For kernels that process each sample separately, and for rotary positions per sample.
    cumulative = torch.tensor(borders, dtype=torch.int32, device=accelerator.device())
    longest = max(end - start for start, end in pairwise(borders))
    parameters = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    if config.is_hybrid_model:
        # Each token's sample, for Megatron's Mamba layers.
        parameters.seq_idx = sample_of_tokens(borders)[None].int()
    return {"attention_mask": None, "packed_seq_params": parameters}


def sample_of_tokens(borders: Sequence[int]) -> torch.Tensor:
    """Return the sample index of each token of a packed row, int64 [L]."""
    lengths = torch.tensor([end - start for start, end in pairwise(borders)], device=accelerator.device())
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(
        lengths, output_size=borders[-1]
    )
