"""`PolicyBackend` on Megatron-Core: reads, generation, checkpoints and weights, over the train side.

Shapes: B rows of this rank's shard, S sequence length, K ids a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nemo_rl_mcore.config import PolicyConfig, Role
from nemo_rl_mcore.config.megatron import UNDIVIDED
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.rank import accelerator, activity, rendezvous
from nemo_rl_mcore.rank.agreement import together
from nemo_rl_mcore.rank.checkpoints import BackgroundWrite
from nemo_rl_mcore.rank.megatron import checkpoint, generation, notices, parallel_groups
from nemo_rl_mcore.rank.megatron.hf_weights.export import full_tensors, save_pretrained
from nemo_rl_mcore.rank.megatron.hf_weights.load import WholeWeightFilling
from nemo_rl_mcore.rank.megatron.offload import Offload
from nemo_rl_mcore.rank.megatron.reference_policy import ReferencePolicy, is_kept_on_device
from nemo_rl_mcore.rank.megatron.train_backend import MegatronTrainBackend
from nemo_rl_mcore.rank.policy_backend import (
    BackendOptions,
    GeneratedRows,
    GenerationRequest,
    GeneratorBackend,
    OnDevice,
    TopKLogits,
    WeightFilling,
)


def open_backend(policy: PolicyConfig, options: BackendOptions) -> MegatronBackend:
    """Meet the other ranks and build this rank's part of the model; the device is prepared, see `accelerator`."""
    notices.tell_once()
    activity.advance("meeting the other ranks")
    parallel_groups.initialize(policy.megatron_cfg, options.seed)
    activity.advance("building the model")
    return MegatronBackend(policy, options)


def open_generator(policy: PolicyConfig) -> GeneratorBackend:
    """Build the whole model in this process, with random weights until others are brought; see `open_backend`."""
    rendezvous.join_alone()
    config = policy.megatron_cfg.model_copy(update=UNDIVIDED)
    alone = policy.model_copy(update={"megatron_cfg": config, "model_name": None})
    options = BackendOptions(
        seed=0,
        role=Role.POLICY,
        trained=False,
        temperature=policy.generation.temperature,
        verify_checksums=True,
    )
    return open_backend(alone, options)


class MegatronBackend(MegatronTrainBackend):
    """Implements `rank.policy_backend.PolicyBackend` for one rank. Its process groups must be initialised.

    Where one rank holds the whole model it is a `GeneratorBackend` too.
    """

    def __init__(self, policy: PolicyConfig, options: BackendOptions):
        super().__init__(policy, options)
        self._policy = policy
        self._verify_checksums = options.verify_checksums
        self._reference: ReferencePolicy | None = None
        self._offload = Offload(self.chunks, self._wrapped, self.optimizer if self.trained else None)

    @property
    def device(self) -> torch.device:
        """Return the device of this process."""
        return accelerator.device()

    def data_parallel_rank(self) -> int:
        """Return the place of this rank among those that hold different samples."""
        return parallel_groups.data_parallel_rank()

    def data_parallel_size(self) -> int:
        """Return how many ranks hold different samples."""
        return parallel_groups.data_parallel_size()

    # Reads

    def logprobs(self, data: BatchedDataDict, micro_batch_size: int, *, trained_only: bool = False) -> Tensor:
        """Return the log-probabilities fp32 [B, S]; see `PolicyBackend.logprobs`."""
        return self._logprobs("get_logprobs", data, micro_batch_size, trained_only)

    def keep_reference(self) -> None:
        """Copy the weights, see `megatron.reference_policy`."""
        on_device = is_kept_on_device(self._policy, self.chunks)
        self._reference = ReferencePolicy(self.chunks, on_device=on_device)

    def reference_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int, *, trained_only: bool = False
    ) -> Tensor:
        """Return the log-probabilities fp32 [B, S] under the reference weights."""
        assert self._reference is not None
        with self._reference.swapped_in():
            return self._logprobs("get_reference_policy_logprobs", data, micro_batch_size, trained_only)

    def topk_logits(
        self, data: BatchedDataDict, k: int, micro_batch_size: int, *, trained_only: bool = False
    ) -> TopKLogits:
        """Return the k most probable next tokens; see `PolicyBackend.topk_logits`."""
        names = ("topk_logits", "topk_indices", "logsumexp", "tail_logmass")
        read = self._read(
            "get_topk_logits",
            lambda: (
                self.forward.topk(data, k, micro_batch_size, trained_only=trained_only) or [None] * len(names)
            ),
        )
        return TopKLogits(**dict(zip(names, read, strict=True)))

    def values(self, data: BatchedDataDict, micro_batch_size: int) -> Tensor:
        """Return a critic's values fp32 [B, S]; see `PolicyBackend.values`."""
        return self._read("get_values", lambda: [self.forward.values(data, micro_batch_size)])[0]

    def generate(self, request: GenerationRequest) -> GeneratedRows:
        """Decode with the training model; see `rank.megatron.generation`."""
        with together("the end of generate"):
            return generation.generate(self.decoding(), request)

    def decoding(self) -> generation.DecodingSession:
        """See `GeneratorBackend.decoding`."""
        return generation.DecodingSession(self.forward, self._policy.model.vocab_size)

    def next_logprobs(self, prompts: Sequence[Sequence[int]], temperature: float) -> Tensor:
        """See `GeneratorBackend.next_logprobs`."""
        return generation.next_logprobs(self.forward, self._policy.model.vocab_size, prompts, temperature)

    def _logprobs(
        self, call: str, data: BatchedDataDict, micro_batch_size: int, trained_only: bool
    ) -> Tensor:
        return self._read(
            call, lambda: [self.forward.logprobs(data, micro_batch_size, trained_only=trained_only)]
        )[0]

    @staticmethod
    def _read(call: str, read: Callable[[], Sequence[Tensor | None]]) -> list[Tensor]:
        """Return the tensors that the last pipeline stage reads, on every stage and on the CPU.

        Ranks with more rows than others are waited for with patience, unlike those of a train step.
        """
        with together(f"the end of {call}"):
            local = read()
        return [parallel_groups.broadcast_tensor_from_last_stage(values).cpu() for values in local]

    # Checkpoints and weights

    def keep_on_device(self, what: OnDevice) -> None:
        """See `PolicyBackend.keep_on_device`."""
        self._offload.keep(what)

    def save(self, folder: Path, committed_step_ids: Sequence[str]) -> None:
        """See `rank.megatron.checkpoint.save_policy`."""
        checkpoint.save_policy(self, self._policy.megatron_cfg, self._reference, folder, committed_step_ids)

    def save_in_background(self, folder: Path, committed_step_ids: Sequence[str]) -> BackgroundWrite:
        """See `rank.megatron.checkpoint.copy_policy`."""
        group, device = rendezvous.background_group(), self.device
        write = checkpoint.copy_policy(
            self, self._policy.megatron_cfg, self._reference, folder, committed_step_ids
        )

        def write_copy() -> None:
            accelerator.compute_on(device)
            write(group)

        return BackgroundWrite(write_copy)

    def load(self, folder: Path) -> Sequence[str]:
        """See `rank.megatron.checkpoint.load_policy`."""
        return checkpoint.load_policy(
            self,
            self._policy.megatron_cfg,
            self._reference,
            folder,
            verify_checksums=self._verify_checksums,
        )

    def load_weights(self, folder: Path, *, of_a_policy: bool = False) -> None:
        """See `rank.megatron.checkpoint.load_weights_of`; an optimizer takes its copies again."""
        checkpoint.load_weights_of(
            self.chunks, folder, of_a_policy=of_a_policy, verify_checksums=self._verify_checksums
        )
        self.weights_replaced()

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `rank.megatron.hf_weights.export.full_tensors`."""
        return full_tensors(self.chunks, self._policy)

    def filling(self) -> WeightFilling:
        """See `GeneratorBackend.filling`."""
        return WholeWeightFilling(self.chunks, self._policy.model)

    def export_hf(self, folder: Path, origin: str | None) -> None:
        """See `rank.megatron.hf_weights.export.save_pretrained`."""
        save_pretrained(self.chunks, self._policy, folder, origin=origin)

    def shutdown(self) -> None:
        """Leave the layout's groups, then the process group."""
        parallel_groups.destroy()
        rendezvous.leave()
