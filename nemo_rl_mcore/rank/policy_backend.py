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
    """The model of one rank, and all that is done with it.

    The ranks of a run call alike. They meet in `called_together` before each call, where the arguments are judged; the
    calls raise on every rank what they raise on one. Results are the same on all ranks that share a shard of the batch.
    """

    @property
    def trained(self) -> bool:
        """Return whether the train step, `save` and `load` can be called."""
        ...

    @property
    def device(self) -> torch.device:
        """Return what the model is on."""
        ...

    def data_parallel_rank(self) -> int:
        """Return which shard of a batch this rank is to be sent."""
        ...

    def data_parallel_size(self) -> int:
        """Return how many shards a batch has."""
        ...

    def logprobs(self, data: BatchedDataDict, micro_batch_size: int, *, trained_only: bool = False) -> Tensor:
        """Return fp32 [B, S] on the CPU: column i is log p of token i; column 0 and the right padding are 0.

        trained_only: so is all that token_mask [B, S] does not mark, for which no logits are computed.
        In evaluation mode, as all reads; an open train step is left as it is.
        """
        ...

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
    ) -> TopKLogits:
        """Return the k most probable next tokens; trained_only: of those that token_mask marks."""
        ...

    def values(self, data: BatchedDataDict, micro_batch_size: int) -> Tensor:
        """fp32 [B, S] on the CPU, of a critic: column i is of the state before token i; column 0 and padding are 0."""
        ...

    def generate(self, request: GenerationRequest) -> GeneratedRows:
        """Answer the prompts; a row's tokens depend on the weights, its prompt and its key alone."""
        ...

    def evaluate(self, data: BatchedDataDict, loss_fn: LossFunction, micro_batch_size: int) -> StepTotals:
        """Return the loss and metrics of the rows of all ranks, without gradients."""
        ...

    def keep_on_device(self, what: OnDevice) -> None:
        """Have this on the device, and no more; not while a step is open. It holds no collective.

        Gradients are 0 when they are back; all else is as it was, bit for bit. Steps, `save` and `load` need
        EVERYTHING, other calls the weights.
        """
        ...

    def save(self, folder: Path, committed_step_ids: Sequence[str]) -> None:
        """Write all that the next step depends on, the reference weights included, into an empty or new folder.

        Raises ValueError, before anything is written, when the folder holds something, and OSError when it cannot be
        written.
        """
        ...

    def save_in_background(self, folder: Path, committed_step_ids: Sequence[str]) -> BackgroundWrite:
        """Copy what `save` writes, and write the copy while other calls go on, any of which may change the model.

        One is to have ended before the next begins. Raises as `save` does; what writing raises, the result does.
        """
        ...

    def load(self, folder: Path) -> Sequence[str]:
        """Set back what `save` wrote, and return the committed step_ids.

        Raises ValueError for what is no checkpoint of this model.
        """
        ...

    def load_weights(self, folder: Path, *, of_a_policy: bool = False) -> None:
        """Set the weights back alone; moments and schedule stay.

        of_a_policy: this is a critic, and the folder's model has no value head: its own stays.
        """
        ...

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Return each tensor of the Hugging Face model by its name, whole, on every rank; all must iterate to the end.

        One that is to outlast its turn must be copied.
        """
        ...

    def export_hf(self, folder: Path, origin: str | None) -> None:
        """Write a new Hugging Face folder; `origin` names the model that training started from.

        Raises ValueError when the folder exists.
        """
        ...

    def shutdown(self) -> None:
        """Leave the other ranks."""
        ...


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
        """Load a tensor, whose memory may be reused when this returns.

        Raises ValueError for one that the model does not have, or whose shape is another one.
        """
        ...

    def missing(self) -> Sequence[str]:
        """Return the tensors of the model that have not come."""
        ...


class GeneratorBackend(Protocol):
    """A model that only generates: one process holds all of it, and its weights are brought from elsewhere."""

    @property
    def device(self) -> torch.device:
        """Return what the model is on."""
        ...

    def decoding(self) -> Decoding:
        """Begin responses; several may take turns."""
        ...

    def next_logprobs(self, prompts: Sequence[Sequence[int]], temperature: float) -> Tensor:
        """Of the token after each prompt: fp32 [N, V] on the CPU, computed as a decoding does."""
        ...

    def filling(self) -> WeightFilling:
        """Begin to take new weights."""
        ...

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `PolicyBackend.full_tensors`."""
        ...

    def shutdown(self) -> None:
        """Free what the process holds for the model."""
        ...


GeneratorFactory = Callable[[PolicyConfig], GeneratorBackend]
"""Builds a model of this policy in this process alone, wherever the environment says that it stands among others."""

BackendFactory = Callable[[PolicyConfig, BackendOptions], PolicyBackend]
"""Builds the backend of this rank; the environment says which rank it is."""


_BACKENDS = {"megatron_cfg": "nemo_rl_mcore.rank.megatron.backend"}
"""The section of the policy that switches a framework on, and where its `open_backend` and `open_generator` are."""


def open_backend(policy: PolicyConfig, options: BackendOptions) -> PolicyBackend:
    """Prepare this rank's device, then import the framework of the policy and build its backend."""
    factory: BackendFactory = _framework_of(policy).open_backend
    return factory(policy, options)


def open_generator(policy: PolicyConfig) -> GeneratorBackend:
    """Prepare this process's device, then import the framework of the policy and build a model that only generates."""
    factory: GeneratorFactory = _framework_of(policy).open_generator
    return factory(policy)


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


_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def _framework_of(policy: PolicyConfig) -> Any:
    os.environ.update(launch_settings(policy, os.environ))
    accelerator.install(int(os.environ.get("LOCAL_RANK", "0")))  # before Megatron is imported
    module = next(path for section, path in _BACKENDS.items() if getattr(policy, section).enabled)
    return import_module(module)
