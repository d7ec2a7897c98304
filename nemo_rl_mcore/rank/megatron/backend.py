"""`PolicyBackend` on Megatron-Core: reads, generation, checkpoints and weights, over the train side.

Shapes: B rows of this rank's shard, S sequence length, K ids a token.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_rl_mcore.config import PolicyConfig, Role
from nemo_rl_mcore.config.megatron import UNDIVIDED, PeftConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.ops.sampling import at_temperature
from nemo_rl_mcore.rank import accelerator, activity, rendezvous
from nemo_rl_mcore.rank.agreement import together
from nemo_rl_mcore.rank.checkpoints import BackgroundWrite
from nemo_rl_mcore.rank.megatron import checkpoint, generation, parallel_groups, quiet_notices
from nemo_rl_mcore.rank.megatron.hf_weights.adapters import save_adapters
from nemo_rl_mcore.rank.megatron.hf_weights.export import full_tensors, save_pretrained
from nemo_rl_mcore.rank.megatron.hf_weights.load import WholeWeightFilling
from nemo_rl_mcore.rank.megatron.lora import adapters_off
from nemo_rl_mcore.rank.megatron.optimizer_state import parts_of, weights_of
from nemo_rl_mcore.rank.megatron.passes import ModelPass
from nemo_rl_mcore.rank.megatron.reference_policy import ReferencePolicy, is_kept_on_device
from nemo_rl_mcore.rank.megatron.train_backend import MegatronTrainBackend, evaluation_mode
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
    quiet_notices()
    activity.advance("meeting the other ranks")
    parallel_groups.initialize(policy.megatron_cfg, options.seed, policy.call_timeout_s)
    activity.advance("building the model")
    return MegatronBackend(policy, options)


def open_generator(policy: PolicyConfig) -> GeneratorBackend:
    """Build the whole model in this process, with random weights until others arrive; see `open_backend`."""
    rendezvous.join_alone()
    config = policy.megatron_cfg.model_copy(update=UNDIVIDED | {"peft": PeftConfig()})  # weights come merged
    alone = policy.model_copy(update={"megatron_cfg": config, "model_name": None})
    temperature = policy.generation.temperature
    return open_backend(alone, BackendOptions(0, Role.POLICY, False, temperature, verify_checksums=True))


class MegatronBackend(MegatronTrainBackend):
    """`PolicyBackend` for one rank with initialised groups; a `GeneratorBackend` too if it has the whole model."""

    def __init__(self, policy: PolicyConfig, options: BackendOptions):
        super().__init__(policy, options)
        self._policy = policy
        self._verify_checksums = options.verify_checksums
        # None also beside adapters: without them the model is its reference.
        self._reference: ReferencePolicy | None = None
        self._base: checkpoint.Base | None = None
        if policy.megatron_cfg.peft.enabled:
            self._base = checkpoint.Base(model_name=policy.model_name, init_checkpoint=policy.init_checkpoint)
        # What of the model waits in the CPU's memory, and what is on the device; None while that is being changed.
        self._weights_away, self._state_away = _Shelf(), _Shelf()
        self._present: OnDevice | None = OnDevice.EVERYTHING

    @property
    def device(self) -> torch.device:
        return accelerator.device()

    data_parallel_rank = staticmethod(parallel_groups.data_parallel_rank)
    data_parallel_size = staticmethod(parallel_groups.data_parallel_size)

    # Reads

    def logprobs(self, data: BatchedDataDict, micro_batch_size: int, *, trained_only: bool = False) -> Tensor:
        kind = self.forward.passes.logprobs(trained_only=trained_only)
        return self._read("get_logprobs", data, micro_batch_size, kind)[0]

    def keep_reference(self) -> None:
        if not self._policy.megatron_cfg.peft.enabled:
            on_device = is_kept_on_device(self._policy, self.chunks)
            self._reference = ReferencePolicy(self.chunks, on_device=on_device)

    def reference_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int, *, trained_only: bool = False
    ) -> Tensor:
        kind = self.forward.passes.logprobs(trained_only=trained_only)
        reference = self._reference
        with adapters_off(self.chunks) if reference is None else reference.swapped_in():
            return self._read("get_reference_policy_logprobs", data, micro_batch_size, kind)[0]

    def topk_logits(
        self, data: BatchedDataDict, k: int, micro_batch_size: int, *, trained_only: bool = False
    ) -> TopKLogits:
        kind = self.forward.passes.topk(k, trained_only=trained_only)
        logits, indices, logsumexp, tail = self._read("get_topk_logits", data, micro_batch_size, kind, 4)
        return TopKLogits(logits, indices, logsumexp, tail)

    def values(self, data: BatchedDataDict, micro_batch_size: int) -> Tensor:
        return self._read("get_values", data, micro_batch_size, self.forward.passes.values())[0]

    def _read(
        self, call: str, data: BatchedDataDict, micro_batch_size: int, kind: ModelPass, tensors: int = 1
    ) -> list[Tensor]:
        """Return the tensors that the last pipeline stage reads, on every stage and on the CPU."""
        with together(f"the end of {call}"):
            local = self.forward.read(data, micro_batch_size, kind)
        broadcast = parallel_groups.broadcast_tensor_from_last_stage
        return [broadcast(values).cpu() for values in local or [None] * tensors]

    def generate(self, request: GenerationRequest) -> GeneratedRows:
        with together("the end of generate"):
            return generation.generate(self.decoding(), request)

    def decoding(self) -> generation.DecodingSession:
        return generation.DecodingSession(self.forward, self._policy.model.vocab_size)

    def next_logprobs(self, prompts: Sequence[Sequence[int]], temperature: float) -> Tensor:
        rows: list[Tensor] = []
        with evaluation_mode(self.chunks):
            for prompt in prompts:
                ids_1P = torch.tensor([list(prompt)], device=self.device)
                # By the passes of a session.
                logits_1V = generation.next_logits(self.forward, 1, len(prompt) + 1)(ids_1P)
                logits_1V = at_temperature(logits_1V[:, : self._policy.model.vocab_size], temperature)
                rows.append(logits_1V.log_softmax(-1).cpu())
        return torch.cat(rows)

    # Checkpoints and weights

    def keep_on_device(self, what: OnDevice) -> None:
        """See `PolicyBackend.keep_on_device`; parts that a failed call has left are moved by the next one.

        Megatron frees its gradient buffers itself. Its call for the optimizer gives every tensor new memory, also to
        float32 weights, and that for the weights knows only those of the distributed optimizer. So these are moved
        here, below the tensors: whoever views a storage, such as a shard of a bucket, finds it filled again.
        """
        if self._present is what:
            return
        self._present = None
        everything = what is OnDevice.EVERYTHING
        # Megatron asks for a buffer's storage in a way that torch deprecates.
        quiet = warnings.catch_warnings(action="ignore", category=UserWarning)
        if self.trained and not everything:
            self.optimizer.zero_grad()  # gradients of main weights may have memory of their own
            of_model = {weight.untyped_storage().data_ptr() for weight in weights_of(self.chunks)}
            kept: list[Any] = []
            for part in parts_of(self.optimizer):
                for group in part.optimizer.param_groups:
                    kept += group["params"]
                for state in part.optimizer.state.values():
                    kept += (value for value in state.values() if isinstance(value, Tensor))
            self._state_away.put_away(
                tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in of_model
            )
            with quiet:
                for chunk in self._wrapped:
                    chunk.offload_grad_buffers(empty_cache=False)
        if what is OnDevice.NOTHING:
            self._weights_away.put_away(weights_of(self.chunks))
        else:
            self._weights_away.bring_back()
        if everything:
            self._state_away.bring_back()
            with quiet:
                for chunk in self._wrapped:
                    chunk.restore_grad_buffers()
        else:
            accelerator.empty_cache()  # for other processes
        self._present = what

    def _model(self) -> checkpoint.SavedModel:
        verify = self._verify_checksums
        return checkpoint.SavedModel(self, self._policy, self._reference, self._base, verify)

    def _saved(self) -> checkpoint.SavedModel:
        """Return the parts of a checkpoint; the weights beside adapters never change, and get their digest once."""
        if self._base is not None and not self._base.digest:
            digest = checkpoint.base_digest(self.chunks, self._policy)
            self._base = self._base.model_copy(update={"digest": digest})
        return self._model()

    def save(self, folder: Path, committed_step_ids: Sequence[str]) -> None:
        checkpoint.save_policy(self._saved(), folder, committed_step_ids)

    def save_in_background(self, folder: Path, committed_step_ids: Sequence[str]) -> BackgroundWrite:
        group = rendezvous.background_group()
        write = checkpoint.copy_policy(self._saved(), folder, committed_step_ids)
        return BackgroundWrite(partial(write, group))

    def load(self, folder: Path) -> Sequence[str]:
        return checkpoint.load_policy(self._model(), folder)

    def load_weights(self, folder: Path, *, of_a_policy: bool = False) -> None:
        self._base = checkpoint.load_weights_of(self._model(), folder, of_a_policy=of_a_policy) or self._base
        self.weights_replaced()

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return full_tensors(self.chunks, self._policy)

    def filling(self) -> WeightFilling:
        return WholeWeightFilling(self.chunks, self._policy.model)

    def export_adapters(self, folder: Path, origin: str | None) -> None:
        if self._base is None:
            raise RefusedError(
                "the model has no adapters: policy.megatron_cfg.peft.enabled is false; export its weights",
                code="no-adapters",
            )
        save_adapters(self.chunks, self._policy, folder, origin=origin or self._base.model_name)

    def export_hf(self, folder: Path, origin: str | None) -> None:
        save_pretrained(self.chunks, self._policy, folder, origin=origin)

    def shutdown(self) -> None:
        parallel_groups.destroy()
        rendezvous.leave()


class _Shelf:
    """Storages without memory and their contents, page-locked meanwhile; torch keeps such memory for the next time."""

    def __init__(self) -> None:
        self._contents: list[tuple[torch.UntypedStorage, Tensor]] = []

    def put_away(self, tensors: Iterable[Tensor]) -> None:
        device, pinned = accelerator.device(), accelerator.has_cuda()
        of_tensors = (tensor.untyped_storage() for tensor in tensors if tensor.device == device)
        taken: list[tuple[torch.UntypedStorage, Tensor]] = []
        for storage in {storage.data_ptr(): storage for storage in of_tensors}.values():
            if size := storage.nbytes():
                contents = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                view = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
                taken.append((storage, contents.copy_(view, non_blocking=True)))
        accelerator.synchronize(device)
        for storage, _ in taken:
            storage.resize_(0)
        self._contents += taken

    def bring_back(self) -> None:
        device = accelerator.device()
        while self._contents:  # for want of memory it may end half-way, and be called again
            storage, contents = self._contents[-1]
            storage.resize_(contents.numel())
            torch.empty(0, dtype=torch.uint8, device=device).set_(storage).copy_(contents)
            self._contents.pop()
