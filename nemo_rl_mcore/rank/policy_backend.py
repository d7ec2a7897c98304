"""`PolicyBackend`: all that a worker asks of the framework which holds its model.

Shapes: B rows of this rank's shard, S sequence length, K ids a token, T new tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, Self

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
    """How a policy's model is built, beside what its config says.

    seed: of the random initialisation and of dropout.
    role: a policy says how probable tokens are, a critic how much is to be expected of a state.
    trained: whether there are gradient buffers, an optimizer and its schedule; what needs them is not called else.
    temperature: divides the logits in every log-probability.
    verify_checksums: whether a checkpoint's files are compared with their checksums before they are read.
    """

    seed: int
    role: Role
    trained: bool
    temperature: float
    verify_checksums: bool


class OnDevice(Enum):
    """What of a model is on its device; the rest waits in the CPU's memory, but for gradients, which are not kept."""

    NOTHING = "nothing"
    WEIGHTS = "weights"
    EVERYTHING = "everything"


@dataclass(frozen=True)
class TopKLogits:
    """The K most probable next tokens at each position, on the CPU; 0 where the next token is not real.

    topk_logits: fp32 [B, S, K], divided by the temperature, the largest first; topk_indices: int64 [B, S, K], their
    ids. logsumexp: fp32 [B, S], over the whole vocabulary; tail_logmass: fp32 [B, S], the log of the probability of all
    other ids.
    """

    topk_logits: Tensor
    topk_indices: Tensor
    logsumexp: Tensor
    tail_logmass: Tensor


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate: ragged prompts, each with the key of its noise.

    prompts: token ids of each row; keys_B: int64 [B], see `ops.sampling.sample_keys`; stops: what ends each row;
    batch_size: rows that are decoded together at most, None for all. longest: tokens of prompt and response together
    at most, None for no such bound.
    """

    prompts: Sequence[Sequence[int]]
    keys_B: Tensor
    max_new_tokens: int
    stops: Sequence[StopConditions]
    sampling: SamplingParams
    batch_size: int | None = None
    longest: int | None = None

    @classmethod
    def of(
        cls,
        policy: PolicyConfig,
        data: BatchedDataDict,
        keys_B: Tensor,
        stops: Sequence[StopConditions],
        *,
        greedy: bool,
    ) -> Self:
        """Sample as the config says, from right-padded prompts: input_ids [B, P], input_lengths [B]."""
        ids: list[list[int]] = data["input_ids"].tolist()
        lengths: list[int] = data["input_lengths"].tolist()
        sampling = policy.generation
        return cls(
            prompts=[row[:length] for row, length in zip(ids, lengths, strict=True)],
            keys_B=keys_B,
            max_new_tokens=sampling.max_new_tokens,
            stops=stops,
            sampling=SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, greedy),
            batch_size=policy.generation_batch_size,
            longest=policy.longest_of_prompt,
        )

    def bound(self, place: int) -> int:
        """Return the most tokens of the response to a prompt."""
        return bound_of(self.max_new_tokens, self.longest, len(self.prompts[place]))


@dataclass(frozen=True)
class GeneratedRows:
    """Responses on the CPU: tokens int64 [B, T] and logprobs fp32 [B, T], both 0 from `lengths` int64 [B] on.

    finished: bool [B], the row met a stop condition, and did not end at the length limit. digests: int64 [B], of the
    tokens as they were drawn, see `data.token_digests`.
    """

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    finished: Tensor
    digests: Tensor


@dataclass(frozen=True)
class SampledTokens:
    """One more token of each response of a batch that was not complete, on the CPU; N rows.

    rows int64 [N], as `Decoding.add` numbers them; tokens int64 [N]; logprobs fp32 [N]; stopped bool [N]: the token
    met a stop condition, and is the last one.
    """

    rows_N: Tensor
    tokens_N: Tensor
    logprobs_N: Tensor
    stopped_N: Tensor


class PolicyBackend(TrainStepBackend, Protocol):
    """The model of one rank, and all that is done with it; results are those of the worker's calls of the same name.

    The ranks of a run call alike. They meet in `called_together` before each call, where the arguments are judged; the
    calls raise on every rank what they raise on one. Results are the same on all ranks that share a shard of the batch,
    and on the CPU. Reads are in evaluation mode, and leave an open train step as it is.
    """

    @property
    def trained(self) -> bool:
        """The train step, `save` and `load` can be called."""
        ...

    @property
    def device(self) -> torch.device: ...

    def data_parallel_rank(self) -> int: ...
    def data_parallel_size(self) -> int: ...
    def logprobs(
        self, data: BatchedDataDict, micro_batch_size: int, *, trained_only: bool = False
    ) -> Tensor: ...
    def keep_reference(self) -> None:
        """Keep the present weights as those of the reference policy."""
        ...

    def reference_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int, *, trained_only: bool = False
    ) -> Tensor:
        """`logprobs` under the weights that `keep_reference` kept; the policy's own are back also after an error."""
        ...

    def topk_logits(
        self, data: BatchedDataDict, k: int, micro_batch_size: int, *, trained_only: bool = False
    ) -> TopKLogits: ...
    def values(self, data: BatchedDataDict, micro_batch_size: int) -> Tensor: ...
    def generate(self, request: GenerationRequest) -> GeneratedRows:
        """Answer the prompts; a row's tokens depend on the weights, its prompt and its key alone."""
        ...

    def evaluate(self, data: BatchedDataDict, loss_fn: LossFunction, micro_batch_size: int) -> StepTotals:
        """Return the loss and metrics of the rows of all ranks, without gradients."""
        ...

    def keep_on_device(self, what: OnDevice) -> None:
        """Have this on the device, and no more; not while a step is open. It holds no collective.

        Gradients are 0 when they are back; all else is as it was, bit for bit.
        """
        ...

    def save(self, folder: Path, committed_step_ids: Sequence[str]) -> None:
        """Write all that the next step depends on; ValueError, with nothing written, for a folder that is not empty."""
        ...

    def save_in_background(self, folder: Path, committed_step_ids: Sequence[str]) -> BackgroundWrite:
        """Copy what `save` writes, and write that while other calls go on; one ends before the next begins."""
        ...

    def load(self, folder: Path) -> Sequence[str]:
        """Set back what `save` wrote, and return the committed step_ids."""
        ...

    def load_weights(self, folder: Path, *, of_a_policy: bool = False) -> None:
        """Set the weights back alone; of_a_policy: this is a critic, and its value head, which that lacks, stays."""
        ...

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the Hugging Face model, each whole until its turn ends; all ranks iterate to the end."""
        ...

    def export_hf(self, folder: Path, origin: str | None) -> None: ...
    def shutdown(self) -> None: ...


class Decoding(Protocol):
    """Responses that grow by a token a step; between two steps the model may be given other weights.

    The next token is drawn with those, after what the cache holds of the former ones. A step that raises ends it.
    """

    def add(self, request: GenerationRequest) -> range:
        """Queue prompts; returns the numbers of their rows."""
        ...

    def step(self) -> SampledTokens | None:
        """Draw a token for each row of the running batch, or of the next one; None when nothing is left to do."""
        ...

    def reread(self) -> None:
        """Forget the cache: the next step reads all tokens so far again, with the weights of that time."""
        ...


class WeightFilling(Protocol):
    """Whole Hugging Face tensors on their way into a model."""

    def take(self, name: str, tensor: Tensor) -> None:
        """Load a tensor, whose memory may be reused then; ValueError for one that the model does not have like that."""
        ...

    def missing(self) -> Sequence[str]:
        """Return the tensors of the model that have not come."""
        ...


class GeneratorBackend(Protocol):
    """A model that only generates: one process holds all of it, and its weights are brought from elsewhere."""

    @property
    def device(self) -> torch.device: ...

    def decoding(self) -> Decoding:
        """Begin responses; several may take turns."""
        ...

    def next_logprobs(self, prompts: Sequence[Sequence[int]], temperature: float) -> Tensor:
        """Of the token after each prompt: fp32 [N, V] on the CPU, computed as a decoding does."""
        ...

    def filling(self) -> WeightFilling: ...
    def full_tensors(self) -> Iterator[tuple[str, Tensor]]: ...
    def shutdown(self) -> None: ...


GeneratorFactory = Callable[[PolicyConfig], GeneratorBackend]
"""Builds a model of this policy in this process alone, wherever the environment says that it stands among others."""

BackendFactory = Callable[[PolicyConfig, BackendOptions], PolicyBackend]
"""Builds the backend of this rank; the environment says which rank it is."""

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def open_backend(policy: PolicyConfig, options: BackendOptions) -> PolicyBackend:
    """Prepare this rank's device, then import Megatron and build its backend."""
    factory: BackendFactory = _megatron(policy).open_backend
    return factory(policy, options)


def open_generator(policy: PolicyConfig) -> GeneratorBackend:
    """Prepare this process's device, then import Megatron and build a model that only generates."""
    factory: GeneratorFactory = _megatron(policy).open_generator
    return factory(policy)


def _megatron(policy: PolicyConfig) -> Any:
    os.environ.update(launch_settings(policy, os.environ))
    accelerator.install(int(os.environ.get("LOCAL_RANK", "0")))  # before Megatron is imported
    return import_module("nemo_rl_mcore.rank.megatron.backend")


def launch_settings(policy: PolicyConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what CUDA has to read before its first use, where the environment does not say it.

    One hardware queue starts kernels in the order in which they are launched: with tensor or context parallelism the
    communication of a layer then begins before the products that it is to overlap with (megatron/training/arguments.py;
    Blackwell needs no such thing). Overlapped communication of experts needs several, which is CUDA's own default.
    """
    megatron = policy.megatron_cfg
    shared = megatron.tensor_model_parallel_size > 1 or megatron.context_parallel_size > 1
    if not shared or megatron.overlap_moe_expert_parallel_comm or _QUEUES in environ:
        return {}
    return {_QUEUES: "1"}
