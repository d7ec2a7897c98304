"""Microbatches of this rank, and the model's attention inputs for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

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
from nemo_rl_mcore.rank.megatron.context_parallel import (
    ContextParallelMicrobatch,
    context_parallel_rank,
    context_parallel_size,
    slices_of_a_sample,
    zigzag,
)


@dataclass(frozen=True)
class Batching:
    """Splits this rank's rows into microbatches, on the CPU.

    column_multiple: of padded lengths and, under context parallelism, of the samples' lengths in a packed row.
    budgets: token budgets of a microbatch; None for a fixed number of rows.
    """

    config: TransformerConfig
    column_multiple: int
    budgets: TokenBudgets | None = None

    def microbatches(
        self, data: BatchedDataDict, micro_batch_size: int, rows_per_sample: int | None
    ) -> list[Microbatch]:
        """Return the microbatches of one schedule call; rows_per_sample: of the loss, None for a pass without one."""
        config, budgets, rows = self.config, self.budgets, rows_per_sample or 1
        if rows_per_sample is None:
            data = data.without(EPISODE)
        strategy = FixedRows(micro_batch_size, self.column_multiple, rows)
        if budgets is not None:
            tokens = budgets.logprob if rows_per_sample is None else budgets.of_training(rows)
            budget = TokenBudget(tokens, budgets.length_round, self.column_multiple)
            strategy = DynamicRows(budget, rows)
            if budgets.packed:
                slices = slices_of_a_sample(config.context_parallel_size)
                pipelined = config.pipeline_model_parallel_size > 1
                strategy = PackedRows(budget, pipelined, rows, row_multiple=slices)
        groups = strategy.groups(data)
        calls = max(len(groups), 1)  # a rank without rows still runs the model once
        if config.expert_model_parallel_size > 1:
            # Each forward pass exchanges tokens with other data-parallel ranks, so all need the same number of passes.
            calls = parallel_groups.largest_of_data_parallel_ranks(calls)
        if config.virtual_pipeline_model_parallel_size is not None:
            calls = round_up(calls, config.pipeline_model_parallel_size)
        built = strategy.build(data, groups + [[]] * (calls - len(groups)))
        if config.context_parallel_size == 1:
            return built
        ranks, rank = context_parallel_size(), context_parallel_rank()
        shared: list[Microbatch] = []
        for whole in built:
            own = zigzag(whole.borders or (0, whole.input_ids.shape[1]), ranks)[rank]
            shared.append(ContextParallelMicrobatch(whole.rows, whole.places, whole, own))
        return shared


def attention_inputs(microbatch: Microbatch, config: TransformerConfig) -> dict[str, Any]:
    """Return GPTModel's keywords that restrict attention to a token's own sample; rows of one sample need no mask."""
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
        # For Megatron's Mamba layers: the sample of each token.
        parameters.seq_idx = sample_of_tokens(borders)[None].int()
    return {"attention_mask": None, "packed_seq_params": parameters}


def sample_of_tokens(borders: Sequence[int]) -> torch.Tensor:
    """Return the sample index of each token of a packed row, int64 [L]."""
    lengths = torch.tensor([end - start for start, end in pairwise(borders)], device=accelerator.device())
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(
        lengths, output_size=borders[-1]
    )
