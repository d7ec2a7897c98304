"""What runs inside the engine's process, beside the model: it loads buckets of weights. Nothing of Megatron is here.

vLLM mixes `RefitExtension` into its worker class, whose other attributes it must not share a name with.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_pp_group
from vllm.model_executor.layers import utils as vllm_linear
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from nemo_rl_mcore.engine.vllm.held_weights import held_blocks
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.refit.transports import Receivers

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_PR_SET_PDEATHSIG = 1


class RefitExtension:
    """Methods of a vLLM worker, called through `collective_rpc`: begin, load bucket after bucket, finish.

    Tensors are copied into the model as they arrive, so between begin and finish the weights are of no version; who
    calls must not generate then (`engine.HeldWeights` sees to it).
    """

    if TYPE_CHECKING:
        device: torch.device
        rank: int
        model_runner: GPUModelRunner
        vllm_config: VllmConfig

    def join_refit_broadcast(
        self, address: str, port: int, first_rank: int, world_size: int, timeout_s: float
    ) -> None:
        """Join the group in which the trainer's rank 0 broadcasts; this engine's workers start at `first_rank`."""
        self._refit_ends().join_broadcast(address, port, first_rank + self.rank, world_size, timeout_s)

    def begin_refit(self) -> None:
        """Forget what an earlier refit, perhaps an abandoned one, has loaded."""
        self._refit_received: set[str] = set()
        self._refit_loaded: set[str] = set()
        self._refit_ends().close()
        self._refit_make_room_between_stages()
        self._refit_quantize()  # what an abandoned refit has left
        if self._refit_quantizes:
            initialize_layerwise_reload(self._refit_model())
        # Where vLLM quantizes, it makes others of them, and scales, once a layer is complete.
        self._refit_parameters = [name for name, _ in self._refit_model().named_parameters()]

    def load_refit_bucket(self, message: dict[str, Any]) -> None:
        """Copy a bucket's tensors, named as Hugging Face names them, into the model."""
        tensors = dict(self._refit_ends().read(message))
        if self._refit_quantizes:  # vLLM keeps them until a layer is complete, and the bucket is filled again
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self._refit_loaded |= self._refit_model().load_weights(iter(tensors.items()))
        self._refit_received.update(tensors)
        accelerator.synchronize(self.device)

    def finish_refit(self, read_back: bool) -> dict[str, Any]:
        """Say what this process has, in plain data, for `engine.require_refit`.

        read_back: whether what the model holds is read.
        """
        self._refit_ends().close()
        self._refit_quantize()
        model = self._refit_model()
        blocks, unreadable = held_blocks(model) if read_back else ([], [])
        return {
            "received": sorted(self._refit_received),
            "unwritten": unwritten(self._refit_parameters, self._refit_loaded),
            "blocks": [asdict(block) for block in blocks],
            "unreadable": unreadable,
        }

    @property
    def _refit_quantizes(self) -> bool:
        return self.vllm_config.model_config.quantization is not None

    def _refit_quantize(self) -> None:
        """Have vLLM quantize what has been loaded and is not yet, if anything is."""
        if self._refit_quantizes:
            with set_current_vllm_config(self.vllm_config):
                finalize_layerwise_reload(self._refit_model(), self.vllm_config.model_config)

    def _refit_make_room_between_stages(self) -> None:
        """Make what a later stage gets its input in: vLLM does so as it warms up, which it does not on CPU."""
        runner = self.model_runner
        if (
            self.device.type == "cpu"
            and not get_pp_group().is_first_rank
            and runner.intermediate_tensors is None
        ):
            runner.intermediate_tensors = self._refit_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=self.device
            )

    def _refit_model(self) -> Any:
        return self.model_runner.get_model()

    def _refit_ends(self) -> Receivers:
        # vLLM mixes this class in after it has made the worker: there is no constructor of its own.
        return vars(self).setdefault("_refit_receivers", Receivers(self.device))


def unwritten(parameters: Iterable[str], loaded: Iterable[str]) -> list[str]:
    """Return those of the parameters that are not among the names that `load_weights` gave back.

    Up to 0.31 vLLM leaves the layer `routed_experts` out of the names of experts' weights.
    """

    def said(name: str) -> str:
        return name.replace(".routed_experts.", ".")

    known = {said(name) for name in loaded}
    return sorted(name for name in parameters if said(name) not in known)


def _keep_weights_unpacked() -> None:
    """Let linear layers on CPU multiply by their weights as they are.

    vLLM packs copies of them when it loads a model, and knows no way to pack new ones: a refit would raise, or with
    tied embeddings leave the output layer at the old weights without a word.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        vllm_linear.dispatch_cpu_unquantized_gemm = _use_plain_linear


def _use_plain_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _end_with_parent() -> None:
    """Let the kernel end this process with the one that started it, however that ends: no engine is left behind."""
    if multiprocessing.parent_process() is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_keep_weights_unpacked()
_end_with_parent()
