"""A rank's model on Megatron-Core: adds reads, generation, checkpoints and weights to the train backend.

Shapes: B rows of this rank's shard, S sequence length, K ids per token.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.config.megatron import UNDIVIDED, PeftConfig
from nemo_rl_mcore.config.policy import REFERENCE_SHARE
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import ROUTED_EXPERTS
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.ops.sampling import at_temperature
from nemo_rl_mcore.rank import accelerator, activity, rendezvous
from nemo_rl_mcore.rank.agreement import together
from nemo_rl_mcore.rank.checkpoints import BackgroundWrite
from nemo_rl_mcore.rank.megatron import (
    checkpoint,
    generation,
    parallel_groups,
    quiet_notices,
    reference_policy,
)
from nemo_rl_mcore.rank.megatron.hf_weights.adapters import save_adapters
from nemo_rl_mcore.rank.megatron.hf_weights.export import full_tensors, save_pretrained
from nemo_rl_mcore.rank.megatron.hf_weights.load import WholeWeightFilling
from nemo_rl_mcore.rank.megatron.lora import adapters_off
from nemo_rl_mcore.rank.megatron.optimizer_state import parts_of, weights_of
from nemo_rl_mcore.rank.megatron.passes import ModelPass
from nemo_rl_mcore.rank.megatron.reference_policy import ReferencePolicy
from nemo_rl_mcore.rank.megatron.router_replay import Recording
from nemo_rl_mcore.rank.megatron.train_backend import MegatronTrainBackend, evaluation_mode
from nemo_rl_mcore.rank.policy_backend import (
    BackendOptions,
    GeneratedRows,
    GenerationRequest,
    OnDevice,
    TopKLogits,
)


def open_backend(policy: PolicyConfig, options: BackendOptions, *, alone: bool = False) -> MegatronBackend:
    """Meet the other ranks and build this rank's part of the model, on the device that `accelerator` has prepared.

    alone: build the whole model in this process, with random weights until it receives a policy's.
    """
    quiet_notices()
    if alone:
        rendezvous.join(alone=True)
        # Weights arrive merged.
        config = policy.megatron_cfg.model_copy(update=UNDIVIDED | {"peft": PeftConfig()})
        policy = policy.model_copy(update={"megatron_cfg": config, "model_name": None})
    activity.advance("meeting the other ranks")
    parallel_groups.initialize(policy.megatron_cfg, options.seed, policy.call_timeout_s)
    activity.advance("building the model")
    return MegatronBackend(policy, options)


class MegatronBackend(MegatronTrainBackend):
    """One rank's model, for a worker or, if the whole model is in this process, for an embedded engine.

    All ranks make the same calls, each after `called_together`, in which arguments are validated; an error of one rank
    is raised on all. Inference runs in evaluation mode and does not change an open train step. Results are on the CPU,
    as `MegatronPolicyWorker` returns them.
    """

    def __init__(self, policy: PolicyConfig, options: BackendOptions):
        super().__init__(policy, options)
        self.data_parallel_rank: int = parallel_state.get_data_parallel_rank()
        self.data_parallel_size: int = parallel_state.get_data_parallel_world_size()
        self._policy = policy
        self._verify_checksums = options.verify_checksums
        # Also None with adapters: the model without them is its own reference.
        self._reference: ReferencePolicy | None = None
        self._base: checkpoint.Base | None = None
        if policy.megatron_cfg.peft.enabled:
            self._base = checkpoint.Base(model_name=policy.model_name, init_checkpoint=policy.init_checkpoint)
        self._writers: dist.ProcessGroup | None = None
        """Like `rendezvous.patient_group`, for the threads that write checkpoints in the background."""
        self._weights_away, self._state_away = _Shelf(), _Shelf()
        self._present: OnDevice | None = OnDevice.EVERYTHING  # None while parts are being moved
        self.device = accelerator.device()
        self.decoding = partial(
            generation.DecodingSession,
            self.forward,
            policy.model.vocab_size,
            keeps_routes=policy.engines_return_routes,
        )
        self.full_tensors = partial(full_tensors, self.chunks, policy)
        self.filling = partial(WholeWeightFilling, self.chunks, policy.model)

    def keep_reference(self) -> None:
        """Keep a copy of the current weights as the reference policy, on the device if there is room.

        The copy is kept in CPU memory if an engine takes turns with this model.
        """
        if self._policy.megatron_cfg.peft.enabled:
            return
        on_device, free = reference_policy.ON_DEVICE, accelerator.free_memory_bytes()
        if on_device is None:
            size = sum(weight.nbytes for weight in weights_of(self.chunks))
            alone = not self._policy.generation.takes_turns
            on_device = free is None or (alone and size <= REFERENCE_SHARE * free)
        self._reference = ReferencePolicy(self.chunks, on_device=on_device)

    def logprobs(
        self,
        data: BatchedDataDict,
        micro_batch_size: int,
        *,
        trained_only: bool = False,
        of_reference: bool = False,
    ) -> Tensor:
        """of_reference: use the reference weights, without filters; the policy's are restored, even after an error."""
        kind = self.forward.passes.logprobs(trained_only=trained_only, filtered=not of_reference)
        if not of_reference:
            return self._read("get_logprobs", data, micro_batch_size, kind)[0]
        reference = self._reference
        data = data.without(ROUTED_EXPERTS)
        with adapters_off(self.chunks) if reference is None else reference.swapped_in():
            return self._read("get_reference_policy_logprobs", data, micro_batch_size, kind)[0]

    def logprobs_and_routes(
        self, data: BatchedDataDict, micro_batch_size: int, *, trained_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities, and the experts that their pass chose for each token, [B, S, L, K]."""
        assert self.forward.routes is not None
        recording: Recording = {}
        kind = replace(self.forward.passes.logprobs(trained_only=trained_only), recording=recording)
        [logprobs] = self._read("get_logprobs", data, micro_batch_size, kind)
        return logprobs, self.forward.routes.gathered(recording, *logprobs.shape)

    def topk_logits(
        self, data: BatchedDataDict, k: int, micro_batch_size: int, *, trained_only: bool = False
    ) -> TopKLogits:
        kind, data = self.forward.passes.topk(k, trained_only=trained_only), data.without(ROUTED_EXPERTS)
        logits, indices, logsumexp, tail = self._read("get_topk_logits", data, micro_batch_size, kind, 4)
        return TopKLogits(logits, indices, logsumexp, tail)

    def values(self, data: BatchedDataDict, micro_batch_size: int) -> Tensor:
        return self._read("get_values", data, micro_batch_size, self.forward.passes.values())[0]

    def _read(
        self, call: str, data: BatchedDataDict, micro_batch_size: int, kind: ModelPass, tensors: int = 1
    ) -> list[Tensor]:
        """Return the last pipeline stage's tensors, on every stage and on the CPU."""
        with together(f"the end of {call}"):
            local = self.forward.read(data, micro_batch_size, kind)
        broadcast = parallel_groups.broadcast_tensor_from_last_stage
        return [broadcast(values).cpu() for values in local or [None] * tensors]

    def generate(self, request: GenerationRequest) -> GeneratedRows:
        """Sample responses; a row's tokens depend only on the weights, its prompt and its key."""
        with together("the end of generate"):
            return generation.generate(self.decoding(), request)

    def next_logprobs(self, prompts: Sequence[Sequence[int]], temperature: float) -> Tensor:
        """Return log-probabilities of each prompt's next token, fp32 [N, V] on the CPU, computed as in decoding."""
        rows: list[Tensor] = []
        with evaluation_mode(self.chunks):
            for prompt in prompts:
                ids_1P = torch.tensor([list(prompt)], device=self.device)
                # The passes are the same as in a decoding session.
                logits_1V = generation.next_logits(self.forward, 1, len(prompt) + 1)(ids_1P)
                logits_1V = at_temperature(logits_1V[:, : self._policy.model.vocab_size], temperature)
                rows.append(logits_1V.log_softmax(-1).cpu())
        return torch.cat(rows)

    def keep_on_device(self, what: OnDevice) -> None:
        """Move these parts to the device and all others off it, bit for bit (gradients as zeros); not during a step.

        If a call fails, the next one moves the rest. Megatron frees its gradient buffers itself. But its function for
        optimizers gives every tensor new memory, even float32 weights, and its function for weights moves only those of
        a distributed optimizer. So both are moved here, storage by storage: every view of a storage, such as a shard of
        a bucket, keeps its place.
        """
        if self._present is what:
            return
        self._present = None
        everything = what is OnDevice.EVERYTHING
        # Megatron uses a call for a buffer's storage that torch deprecates.
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

    def _saved(self, *, with_digest: bool) -> checkpoint.SavedModel:
        """Return a checkpoint's parts; base weights of adapters never change, so their digest is computed once."""
        if with_digest and self._base is not None and not self._base.digest:
            digest = checkpoint.base_digest(self.chunks, self._policy)
            self._base = self._base.model_copy(update={"digest": digest})
        return checkpoint.SavedModel(self, self._policy, self._reference, self._base, self._verify_checksums)

    def save(
        self, folder: Path, committed_step_ids: Sequence[str], *, wait: bool = True
    ) -> BackgroundWrite | None:
        """Write the whole training state; raises ValueError, with nothing written, if the folder is not empty.

        wait=False: copy the state and write the copy in the background, one at a time.
        """
        saved = self._saved(with_digest=True)
        if wait:
            checkpoint.save_policy(saved, folder, committed_step_ids)
            return None
        if self._writers is None:
            writers = dist.new_group(backend="gloo", timeout=rendezvous.PATIENCE)
            self._writers = cast(dist.ProcessGroup, writers)
        write = checkpoint.copy_policy(saved, folder, committed_step_ids)
        return BackgroundWrite(partial(write, self._writers))

    def load(self, folder: Path) -> Sequence[str]:
        """Restore the state that `save` wrote, and return the committed step_ids."""
        return checkpoint.load_policy(self._saved(with_digest=False), folder)

    def load_weights(self, folder: Path, *, of_a_policy: bool = False) -> None:
        """Restore only the weights; of_a_policy: load a policy's into a critic, which keeps its own value head."""
        model = self._saved(with_digest=False)
        self._base = checkpoint.load_weights_of(model, folder, of_a_policy=of_a_policy) or self._base
        if self.trained:
            self.optimizer.reload_model_params()

    def export_hf(self, folder: Path, origin: str | None, *, adapters: bool = False) -> None:
        if not adapters:
            save_pretrained(self.chunks, self._policy, folder, origin=origin)
            return
        if self._base is None:
            raise RefusedError(
                "the model has no adapters: policy.megatron_cfg.peft.enabled is false; export its weights",
                code="no-adapters",
            )
        save_adapters(self.chunks, self._policy, folder, origin=origin or self._base.model_name)

    def shutdown(self) -> None:
        parallel_groups.destroy()
        rendezvous.leave()


@dataclass
class _Shelf:
    """Storages whose contents are in page-locked CPU memory, which torch then keeps for the next time."""

    _contents: list[tuple[torch.UntypedStorage, Tensor]] = field(
        default_factory=list[tuple[torch.UntypedStorage, Tensor]]
    )

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
        while self._contents:  # may fail half-way for lack of memory, and be called again
            storage, contents = self._contents[-1]
            storage.resize_(contents.numel())
            torch.empty(0, dtype=torch.uint8, device=device).set_(storage).copy_(contents)
            self._contents.pop()
