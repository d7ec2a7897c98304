"""Which rows pass through the model together on this rank, how often, and where a token may look."""

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
    BatchingStrategy,
    DynamicRows,
    FixedRows,
    Microbatch,
    PackedRows,
    TokenBudget,
    round_up,
)
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.context_parallel import ContextParallelMicrobatch, slices_of_a_sample


@dataclass(frozen=True)
class Batching:
    """How this rank's rows become microbatches, on the CPU.

    column_multiple: padded lengths are multiples of this; of each sample in a packed row too, as far as context
        parallelism asks for it.
    budgets: what microbatches are sized by; None for a fixed number of rows.
    """

    config: TransformerConfig
    column_multiple: int
    budgets: TokenBudgets | None = None

    def for_training(
        self, data: BatchedDataDict, micro_batch_size: int, rows_per_sample: int
    ) -> list[Microbatch]:
        """Return the microbatches of one schedule call that trains or evaluates; a token budget overrules the size."""
        if self.budgets is None:
            return self._split(data, FixedRows(micro_batch_size, self.column_multiple, rows_per_sample))
        return self._split(
            data, self._by_tokens(self.budgets, self.budgets.of_training(rows_per_sample), rows_per_sample)
        )

    def for_logprobs(self, data: BatchedDataDict, micro_batch_size: int) -> list[Microbatch]:
        """Return the microbatches of a schedule call without a loss, row by row; a token budget overrules the size."""
        data = data.without(EPISODE)
        if self.budgets is None:
            return self._split(data, FixedRows(micro_batch_size, self.column_multiple))
        return self._split(data, self._by_tokens(self.budgets, self.budgets.logprob))

    def _by_tokens(self, budgets: TokenBudgets, tokens: int, rows_per_sample: int = 1) -> BatchingStrategy:
        budget = TokenBudget(tokens, budgets.length_round, self.column_multiple)
        if not budgets.packed:
            return DynamicRows(budget, rows_per_sample)
        stages = self.config.pipeline_model_parallel_size
        slices = slices_of_a_sample(self.config.context_parallel_size)
        return PackedRows(budget, stages > 1, rows_per_sample, row_multiple=slices)

    def _split(self, data: BatchedDataDict, strategy: BatchingStrategy) -> list[Microbatch]:
        groups = strategy.groups(data)
        empty = self._calls(len(groups)) - len(groups)
        built = strategy.build(data, groups + [[]] * empty)
        if self.config.context_parallel_size == 1:
            return built
        return [ContextParallelMicrobatch.of(microbatch) for microbatch in built]

    def _calls(self, microbatches: int) -> int:
        """Return how often this rank runs the model: once at least, however few rows it has."""
        calls = max(microbatches, 1)
        if self.config.expert_model_parallel_size > 1:
            # Each forward pass exchanges tokens with other data-parallel ranks, so all must make as many.
            calls = parallel_groups.largest_of_data_parallel_ranks(calls)
        if self.config.virtual_pipeline_model_parallel_size is not None:
            calls = round_up(calls, self.config.pipeline_model_parallel_size)
        return calls


def attention_inputs(microbatch: Microbatch, config: TransformerConfig) -> dict[str, Any]:
    """GPTModel's keywords that say where a token may look: at its own sample's past.

    Rows of one sample need none: the layers are causal, and padding stands on the right, so that no token sees it.
    """
    borders = microbatch.borders
    if not borders:
        return {"attention_mask": None}
    if config.transformer_impl == "transformer_engine" or config.context_parallel_size > 1:
        return {"attention_mask": None, "packed_seq_params": _packed_seq_params(borders, config)}
    return {"attention_mask": _hidden_keys(borders)}


def _packed_seq_params(borders: tuple[int, ...], config: TransformerConfig) -> PackedSeqParams:
    """Return the borders for kernels that run each sample by itself, and for rotary positions cut sample by sample."""
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
        # Megatron's Mamba layers read which sample each token is of.
        parameters.seq_idx = sample_of_tokens(borders)[None].int()
    return parameters


def _hidden_keys(borders: tuple[int, ...]) -> torch.Tensor:
    """Return bool [1, 1, L, L] for the local layers, true where a query may not look: other samples and its own future.

    The rotary embedding is of relative positions, so it matters nothing where in the row a sample begins.
    """
    sample_L = sample_of_tokens(borders)
    visible_LL = (sample_L.unsqueeze(1) == sample_L).tril()
    return ~visible_LL[None, None]


def sample_of_tokens(borders: Sequence[int]) -> torch.Tensor:
    """Return which sample of a packed row each token is of, int64 [L]."""
    lengths = torch.tensor([end - start for start, end in pairwise(borders)], device=accelerator.device())
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(
        lengths, output_size=borders[-1]
    )
