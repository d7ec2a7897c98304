"""The options, requests and results that a worker and its model exchange, and a function that opens the backend.

Shapes: B rows of this rank's shard, S sequence length, K ids per token, T new tokens, N rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nemo_rl_mcore.config import PolicyConfig, Role
from nemo_rl_mcore.data.tokenizer import StopConditions
from nemo_rl_mcore.ops.sampling import SamplingParams
from nemo_rl_mcore.rank import accelerator

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The dtype of weights and activations, by `policy.precision`."""


@dataclass(frozen=True)
class BackendOptions:
    """Options for a policy's model besides its config.

    seed: for random initialisation and dropout. trained: allocate gradient buffers, an optimizer and a schedule.
    sampling: the temperature of every log-probability, and the filters of the policy's own.
    """

    seed: int
    role: Role
    trained: bool
    sampling: SamplingParams
    verify_checksums: bool


class OnDevice(Enum):
    """Parts of a model to keep on its device; other parts move to CPU memory, except gradients, which are dropped."""

    NOTHING = "nothing"
    WEIGHTS = "weights"
    EVERYTHING = "everything"


@dataclass(frozen=True)
class TopKLogits:
    """The K most probable next tokens at each position, on the CPU; 0 where the next token is not real.

    topk_logits: fp32 [B, S, K], divided by the temperature, the largest first; topk_indices: their ids, int64.
    logsumexp, tail_logmass: fp32 [B, S], logsumexp over the whole vocabulary, and the log of the probability of all
    other ids.
    """

    topk_logits: Tensor
    topk_indices: Tensor
    logsumexp: Tensor
    tail_logmass: Tensor


@dataclass(frozen=True)
class GenerationRequest:
    """Prompts of different lengths, each with the key for its sampling noise (see `ops.sampling.sample_keys`).

    batch_size: maximum number of rows decoded together; None means all. longest: maximum number of tokens in prompt and
    response together; None means no limit.
    """

    prompts: Sequence[Sequence[int]]
    keys_B: Tensor
    max_new_tokens: int
    stops: Sequence[StopConditions]
    sampling: SamplingParams
    batch_size: int | None = None
    longest: int | None = None


@dataclass(frozen=True)
class GeneratedRows:
    """Responses on the CPU: tokens int64 [B, T] and logprobs fp32 [B, T], 0 from position `lengths` int64 [B].

    finished: bool [B], true after a stop condition. digests: int64 [B], digests of the tokens (`data.token_digests`).
    """

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    finished: Tensor
    digests: Tensor


@dataclass(frozen=True)
class SampledTokens:
    """The next token of each unfinished response in a batch, on the CPU; rows have the numbers that `add` gave them.

    stopped: bool [N], true if the token met a stop condition and is the last one. routes: if they are kept, those of
    each row that has ended, without the last token's: [tokens, L, K].
    """

    rows_N: Tensor
    tokens_N: Tensor
    logprobs_N: Tensor
    stopped_N: Tensor
    routes: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])


def open_backend(policy: PolicyConfig, options: BackendOptions, *, alone: bool = False) -> Any:
    """Prepare this process's device, then import Megatron and build this rank's backend.

    alone: build the whole model in this process, for generation only, whatever its rank and world size are.
    """
    megatron = policy.megatron_cfg
    shared = megatron.tensor_model_parallel_size > 1 or megatron.context_parallel_size > 1
    if shared and not megatron.overlap_moe_expert_parallel_comm:
        # CUDA reads this variable at its first use. With one hardware queue a layer's communication starts before the
        # matrix products that it overlaps with (megatron/training/arguments.py). Overlapped communication of experts
        # needs several, the default.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    accelerator.install(int(os.environ.get("LOCAL_RANK", "0")))  # before Megatron is imported
    backend = import_module("nemo_rl_mcore.rank.megatron.backend")
    return backend.open_backend(policy, options, alone=alone)
