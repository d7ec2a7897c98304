"""Code in the engine's process, next to the model, that loads buckets of weights and reads the loaded weights.

vLLM mixes `RefitExtension` into its worker class, so its attributes must differ in name from those of the worker.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from operator import mul
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_pp_group
from vllm.model_executor.layers import utils as vllm_linear
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from nemo_rl_mcore.engine.receivers import Receiver
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.refit.digests import HeldBlock, block_sum
from nemo_rl_mcore.rank.refit.transports import Bucket, join_broadcast_group

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_AS_LOADED = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels that read the experts' weights in place as loaded; other kernels have rearranged copies."""


class UnreadableError(ValueError):
    """A parameter cannot be mapped to Hugging Face tensors."""


@dataclass(frozen=True)
class Block:
    """The current values of a block of a Hugging Face tensor.

    shape: the whole tensor's shape. corner: row and column at which the block begins.
    """

    name: str
    values: torch.Tensor
    shape: tuple[int, ...]
    corner: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a layer: its name in the layer, and the layer's name in the model.

    packed: names of the parts of vLLM's stacked layers, the model's `packed_modules_mapping`.
    """

    layer_name: str
    name: str
    values: torch.Tensor
    packed: Mapping[str, Sequence[str]]

    def rows(self, name: str, values: torch.Tensor, shard: int, rows: int) -> Block:
        """Return a shard, by its number, of a tensor of `rows` rows that is cut evenly."""
        return Block(name, values, (rows, *values.shape[1:]), (shard * values.shape[0], 0))

    def stacked(self, here: Sequence[int], shards: Sequence[int], whole: Sequence[int]) -> Iterator[Block]:
        """Yield a stacked tensor's parts; here, shards, whole: per part, its rows here, its shard and all its rows."""
        parent, _, own = self.layer_name.rpartition(".")
        names = self.packed.get(own)
        if names is None:
            raise UnreadableError("packed_modules_mapping does not list its parts")
        if len(names) != len(here):
            raise UnreadableError(f"{len(here)} parts, and packed_modules_mapping names {len(names)}")
        for name, part, shard, rows in zip(names, self.values.split(here), shards, whole, strict=True):
            yield self.rows(f"{parent}.{name}.{self.name}", part, shard, rows)


def blocks(model: Any) -> Iterator[Block]:
    """Yield the block of each vLLM model parameter in this process; shared parameters appear once.

    Raises UnreadableError, after all others, naming each parameter that cannot be read, with the reason.
    """
    shared: set[int] = set()
    refused: list[str] = []
    for layer_name, layer in model.named_modules():
        for name, values in layer.named_parameters(recurse=False):
            if id(values) in shared:
                continue
            shared.add(id(values))
            parameter = Parameter(layer_name, name, values.detach(), model.packed_modules_mapping)
            try:
                yield from _blocks_of(layer, parameter)
            except UnreadableError as error:
                refused.append(f"{layer_name}.{name} ({error})")
    if refused:
        raise UnreadableError(refused)


def held_blocks(model: Any) -> tuple[list[HeldBlock], list[str]]:
    """Return this process's blocks, and the unreadable parameters, each with the reason."""
    found: list[tuple[Block, torch.Tensor]] = []
    refused: list[str] = []
    try:
        for block in blocks(model):
            row, column = block.corner
            found.append((block, block_sum(block.values, first_row=row, first_column=column)))
    except UnreadableError as error:
        [refused] = error.args
    totals = torch.stack([total for _, total in found]).tolist() if found else []
    held: list[HeldBlock] = []
    for (block, _), total in zip(found, totals, strict=True):
        columns = block.values.shape[-1] if block.values.ndim > 1 else 1
        size = block.values.numel() // max(1, columns), columns
        dtype = str(block.values.dtype).removeprefix("torch.")
        held.append(HeldBlock(block.name, dtype, block.shape, block.corner, size, total))
    return held, refused


def _blocks_of(layer: Any, parameter: Parameter) -> Iterable[Block]:
    """Read a parameter by the exact class of its layer: a subclass may have another layout."""
    kind, name, values = type(layer), f"{parameter.layer_name}.{parameter.name}", parameter.values
    if kind in (RMSNorm, ReplicatedLinear, GateLinear):
        return [Block(name, values, tuple(values.shape))]
    if kind is ColumnParallelLinear:
        return [parameter.rows(name, values, layer.tp_rank, layer.output_size)]
    if kind is RowParallelLinear:
        if parameter.name == "bias":
            return [Block(name, values, tuple(values.shape))]
        shape, corner = (values.shape[0], layer.input_size), (0, layer.tp_rank * values.shape[1])
        return [Block(name, values, shape, corner)]
    if kind is MergedColumnParallelLinear:
        here = [size // layer.tp_size for size in layer.output_sizes]
        return parameter.stacked(here, [layer.tp_rank] * len(here), layer.output_sizes)
    if kind is QKVParallelLinear:
        heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
        total_heads = [layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads]
        shards = [layer.tp_rank, *[layer.tp_rank // layer.num_kv_head_replicas] * 2]
        head_sizes = [layer.head_size, layer.head_size, layer.v_head_size]
        here, whole = ([*map(mul, counts, head_sizes)] for counts in (heads, total_heads))
        return parameter.stacked(here, shards, whole)
    if kind in (VocabParallelEmbedding, ParallelLMHead):
        place = layer.shard_indices
        if layer.num_added_embeddings:
            raise UnreadableError("it has entries beside those of the vocabulary")
        shape = (layer.org_vocab_size, *values.shape[1:])
        return [Block(name, values[: place.num_org_elements], shape, (place.org_vocab_start_index, 0))]
    if kind is RoutedExperts:
        return _experts(layer, parameter)
    raise UnreadableError(f"the layout of {kind.__name__} is unknown")


def _experts(layer: Any, parameter: Parameter) -> Iterator[Block]:
    """Yield the local experts' blocks: w13 is gate above up, w2 is down; both are cut along the hidden units."""
    moe = layer.moe_config
    units = moe.intermediate_size_per_partition
    backend = layer.quant_method.unquantized_backend
    if backend not in _AS_LOADED:
        raise UnreadableError(f"the kernel {backend.value} reads rearranged weights")
    unpadded = moe.intermediate_size_per_partition_unpadded, moe.hidden_dim_unpadded
    if unpadded != (units, moe.hidden_dim) or parameter.name not in ("w13_weight", "w2_weight"):
        raise UnreadableError("its layout is unknown")
    shard, shards = moe.moe_parallel_config.tp_rank, moe.moe_parallel_config.tp_size
    parent = parameter.layer_name.removesuffix(".routed_experts")
    # Each local expert's number in the whole model, and its number here.
    here = [(expert, expert) for expert in range(layer.local_num_experts)]
    if layer.expert_map is not None:
        here = [(expert, local) for expert, local in enumerate(layer.expert_map.tolist()) if local >= 0]
    for expert, local in here:
        values = parameter.values[local]
        name = f"{parent}.{expert}"
        if parameter.name == "w2_weight":
            corner = 0, shard * units
            yield Block(f"{name}.down_proj.weight", values, (moe.hidden_dim, units * shards), corner)
        else:
            for part, rows in zip(("gate_proj", "up_proj"), values.split(units), strict=True):
                yield parameter.rows(f"{name}.{part}.weight", rows, shard, units * shards)


_PR_SET_PDEATHSIG = 1


class RefitExtension:
    """Methods of a vLLM worker, called through `collective_rpc`: begin, load bucket after bucket, finish.

    Tensors are copied into the model as they arrive, so between begin and finish the weights have no version, and the
    engine must not generate (see `engine.HeldWeights`).
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
        timeout, rank = timedelta(seconds=timeout_s), first_rank + self.rank
        group = join_broadcast_group(address, port, rank, world_size, timeout, self.device.type)
        self._refit_ends().group = group

    def begin_refit(self) -> None:
        """Discard an earlier refit's state, even an abandoned one's."""
        self._refit_received: set[str] = set()
        self._refit_loaded: set[str] = set()
        self._refit_ends().close()
        runner = self.model_runner
        model: Any = runner.get_model()
        # A later stage gets its input in tensors that vLLM allocates at warm-up, which it skips on CPU.
        later = self.device.type == "cpu" and not get_pp_group().is_first_rank
        if later and runner.intermediate_tensors is None:
            runner.intermediate_tensors = model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=self.device
            )
        self._refit_quantize()  # the remainder of an abandoned refit
        self._refit_quantizes = self.vllm_config.model_config.quantization is not None
        if self._refit_quantizes:
            initialize_layerwise_reload(model)
        # By their names before vLLM quantizes: once a layer is complete, it has other parameters, and scales.
        self._refit_parameters = [name for name, _ in model.named_parameters()]

    def load_refit_bucket(self, message: dict[str, Any]) -> None:
        """Copy a bucket's tensors, by their Hugging Face names, into the model."""
        bucket = Bucket.from_message(message)
        tensors = dict(bucket.read(self._refit_ends().open(bucket.location)))
        if self._refit_quantizes:  # vLLM keeps them until a layer is complete, and the bucket is filled again
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            model: Any = self.model_runner.get_model()
            self._refit_loaded |= model.load_weights(iter(tensors.items()))
        self._refit_received.update(tensors)
        accelerator.synchronize(self.device)

    def finish_refit(self, read_back: bool) -> dict[str, Any]:
        """Report this process's weights, as plain data, for `engine.require_refit`; read_back: with their sums."""
        self._refit_ends().close()
        self._refit_quantize()
        model = self.model_runner.get_model()
        blocks, unreadable = held_blocks(model) if read_back else ([], [])
        experts = ".routed_experts."  # missing in vLLM's names of loaded experts, up to 0.31
        loaded = {name.replace(experts, ".") for name in self._refit_loaded}
        kept = [name for name in self._refit_parameters if name.replace(experts, ".") not in loaded]
        return {
            "received": sorted(self._refit_received),
            "unwritten": sorted(kept),
            "blocks": [asdict(block) for block in blocks],
            "unreadable": unreadable,
        }

    def _refit_quantize(self) -> None:
        """Have vLLM quantize loaded weights that are not quantized yet."""
        if self.vllm_config.model_config.quantization is not None:
            with set_current_vllm_config(self.vllm_config):
                finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)

    def _refit_ends(self) -> Receiver:
        # vLLM mixes this class in after it has constructed the worker, so a constructor here would not run.
        return vars(self).setdefault("_refit_receivers", Receiver(self.device))


def _use_plain_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


if current_platform.is_cpu():
    # Linear layers multiply by their weights as they are. vLLM packs copies of them when it loads a model, and cannot
    # pack new ones: a refit would raise, or with tied embeddings silently leave the output layer at the old weights.
    vllm_linear.dispatch_cpu_unquantized_gemm = _use_plain_linear

if multiprocessing.parent_process() is not None:
    # The kernel ends this process together with its parent, so no engine is left behind.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
