"""`PolicyBackend`: the interface between a worker and the framework that holds its model.

Shapes: B rows of this rank's shard, S sequence length, K ids a token, T new tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_rl_mcore.config import PolicyConfig, Role
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.tokenizer import StopConditions
from nemo_rl_mcore.losses.base import LossFunction
from nemo_rl_mcore.ops.sampling import SamplingParams, bound_of
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.checkpoints import BackgroundWrite
from nemo_rl_mcore.rank.sums import StepTotals
from nemo_rl_mcore.rank.train_step import TrainStepBackend

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The number format of weights and activations, by `policy.precision`."""


@dataclass(frozen=True)
class BackendOptions:
    """Options of a policy's model besides its config.

    seed: of the random initialisation and of dropout. trained: with gradient buffers, an optimizer and its schedule.
    temperature: divides the logits in every log-probability.
    """

    seed: int
    role: Role
    trained: bool
    temperature: float
    verify_checksums: bool


class OnDevice(Enum):
    """Parts of a model on its device; the others are in CPU memory, except gradients, which are dropped."""

    NOTHING = "nothing"
    WEIGHTS = "weights"
    EVERYTHING = "everything"


@dataclass(frozen=True)
class TopKLogits:
    """The K most probable next tokens at each position, on the CPU; 0 where the next token is not real.

    Logits fp32 [B, S, K], divided by the temperature, the largest first, and their ids int64; fp32 [B, S]: logsumexp
    over the whole vocabulary, and the log of the probability of all other ids.
    """

    topk_logits: Tensor
    topk_indices: Tensor
    logsumexp: Tensor
    tail_logmass: Tensor


@dataclass(frozen=True)
class GenerationRequest:
    """Prompts of different lengths, each with the key of its sampling noise, see `ops.sampling.sample_keys`.

    batch_size: maximum number of rows decoded together, None for all. longest: maximum number of tokens of prompt and
    response together, None for no limit.
    """

    prompts: Sequence[Sequence[int]]
    keys_B: Tensor
    max_new_tokens: int
    stops: Sequence[StopConditions]
    sampling: SamplingParams
    batch_size: int | None = None
    longest: int | None = None

    def bound(self, place: int) -> int:
        """Return the maximum number of tokens of the response to a prompt."""
        return bound_of(self.max_new_tokens, self.longest, len(self.prompts[place]))


@dataclass(frozen=True)
class GeneratedRows:
    """Responses on the CPU: tokens int64 [B, T] and logprobs fp32 [B, T], both 0 from `lengths` int64 [B] on.

    finished: bool [B], true at a stop condition. digests: int64 [B], of the sampled tokens, see `data.token_digests`.
    """

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    finished: Tensor
    digests: Tensor


@dataclass(frozen=True)
class SampledTokens:
    """The next token of each unfinished response of a batch, on the CPU; N rows, numbered as by `Decoding.add`.

    stopped: bool [N], true if the token met a stop condition and is the last one.
    """

    rows_N: Tensor
    tokens_N: Tensor
    logprobs_N: Tensor
    stopped_N: Tensor


class PolicyBackend(TrainStepBackend, Protocol):
    """One rank's model; methods return the results of the worker's methods of the same name, on the CPU.

    All ranks make the same calls, each after `called_together`, in which arguments are validated; an error of one rank
    is raised on all. Inference runs in evaluation mode and does not change an open train step.
    """

    @property
    def trained(self) -> bool:
        """True if the train step, `save` and `load` can be called."""
        ...

    @property
    def device(self) -> torch.device: ...

    def data_parallel_rank(self) -> int: ...
    def data_parallel_size(self) -> int: ...
    def logprobs(
        self, data: BatchedDataDict, micro_batch_size: int, *, trained_only: bool = False
    ) -> Tensor: ...
    def keep_reference(self) -> None:
        """Keep a copy of the current weights as the reference policy."""

    def reference_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int, *, trained_only: bool = False
    ) -> Tensor:
        """`logprobs` under the reference weights; the policy's own are restored, also after an error."""
        ...

    def topk_logits(
        self, data: BatchedDataDict, k: int, micro_batch_size: int, *, trained_only: bool = False
    ) -> TopKLogits: ...
    def values(self, data: BatchedDataDict, micro_batch_size: int) -> Tensor: ...
    def generate(self, request: GenerationRequest) -> GeneratedRows:
        """Sample responses; a row's tokens depend only on the weights, its prompt and its key."""
        ...

    def evaluate(self, data: BatchedDataDict, loss_fn: LossFunction, micro_batch_size: int) -> StepTotals:
        """Return the loss and metrics of the rows of all ranks, without gradients."""
        ...

    def keep_on_device(self, what: OnDevice) -> None:
        """Move these parts to the device and all others off it, bit for bit, gradients as zeros, outside a step."""

    def save(self, folder: Path, committed_step_ids: Sequence[str]) -> None:
        """Write the whole training state; ValueError, with nothing written, if the folder is not empty."""

    def save_in_background(self, folder: Path, committed_step_ids: Sequence[str]) -> BackgroundWrite:
        """Take a copy of what `save` writes, and write it in the background; one at a time."""
        ...

    def load(self, folder: Path) -> Sequence[str]:
        """Restore what `save` wrote, and return the committed step_ids."""
        ...

    def load_weights(self, folder: Path, *, of_a_policy: bool = False) -> None:
        """Restore the weights only; of_a_policy: into a critic, whose value head is kept, since a policy has none."""

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors of the Hugging Face model, each valid until the next; all ranks iterate to the end."""
        ...

    def export_hf(self, folder: Path, origin: str | None) -> None: ...
    def export_adapters(self, folder: Path, origin: str | None) -> None: ...
    def shutdown(self) -> None: ...


class Decoding(Protocol):
    """Incremental decoding, one token of each response per step; an error ends the decoding.

    If weights change between two steps, the next token is sampled with the new ones, over a cache filled by the old.
    """

    def add(self, request: GenerationRequest) -> range:
        """Queue prompts, and return their row numbers."""
        ...

    def step(self) -> SampledTokens | None:
        """Sample a token for each row of the current batch, or of the next one; None when all are finished."""
        ...

    def reread(self) -> None:
        """Drop the cache: the next step recomputes it over all tokens so far, with the current weights."""


class WeightFilling(Protocol):
    """Loads a model from whole Hugging Face tensors, one by one."""

    def take(self, name: str, tensor: Tensor) -> None:
        """Load a tensor, whose memory may be reused afterwards; ValueError for an unknown name or a wrong shape."""

    def missing(self) -> Sequence[str]:
        """Return the names of tensors that were not loaded yet."""
        ...


class GeneratorBackend(Protocol):
    """A model for generation only, whole in one process; its weights are sent by the training ranks."""

    @property
    def device(self) -> torch.device: ...

    def decoding(self) -> Decoding:
        """Start a decoding; several may be interleaved."""
        ...

    def next_logprobs(self, prompts: Sequence[Sequence[int]], temperature: float) -> Tensor:
        """Return log-probabilities of each prompt's next token, fp32 [N, V] on the CPU, computed as in decoding."""
        ...

    def filling(self) -> WeightFilling: ...
    def full_tensors(self) -> Iterator[tuple[str, Tensor]]: ...
    def shutdown(self) -> None: ...


GeneratorFactory = Callable[[PolicyConfig], GeneratorBackend]
"""Builds a generator in this process, without regard to the environment's rank and world size."""

BackendFactory = Callable[[PolicyConfig, BackendOptions], PolicyBackend]
"""Builds the backend of this rank, which is named by the environment."""


def open_backend(policy: PolicyConfig, options: BackendOptions) -> PolicyBackend:
    """Prepare this rank's device, then import Megatron and build its backend."""
    return _megatron(policy).open_backend(policy, options)


def open_generator(policy: PolicyConfig) -> GeneratorBackend:
    """Prepare this process's device, then import Megatron and build a model that only generates."""
    return _megatron(policy).open_generator(policy)


def _megatron(policy: PolicyConfig) -> Any:
    os.environ.update(launch_settings(policy, os.environ))
    accelerator.install(int(os.environ.get("LOCAL_RANK", "0")))  # before Megatron is imported
    return import_module("nemo_rl_mcore.rank.megatron.backend")


def launch_settings(policy: PolicyConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that CUDA must see before its first use, unless they are already set.

    With one hardware queue a layer's communication starts before the matrix products that it overlaps with, under
    tensor or context parallelism (megatron/training/arguments.py). Overlapped communication of experts needs several,
    the default.
    """
    megatron, queues = policy.megatron_cfg, "CUDA_DEVICE_MAX_CONNECTIONS"
    shared = megatron.tensor_model_parallel_size > 1 or megatron.context_parallel_size > 1
    if not shared or megatron.overlap_moe_expert_parallel_comm or queues in environ:
        return {}
    return {queues: "1"}
