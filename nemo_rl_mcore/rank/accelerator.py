"""The only file with code that depends on the device.

With a CUDA device this is a thin veneer over ``torch.cuda`` and changes nothing. Without one, `install` makes code that
was written for CUDA run on CPU tensors with gloo: torch functions that take a device read "cuda" as "cpu", and
Megatron-Core's ``torch.cuda`` calls become inert or act on the CPU generator. Megatron itself is not touched.
`install` belongs at the start of a training process, before ``megatron`` is imported, and nowhere else: a driver or an
inference engine keeps the plain torch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import resource
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import DeviceContext, _device_constructors

_CPU = torch.device("cpu")
_FACTORIES = (
    *("tensor", "as_tensor", "scalar_tensor", "empty", "zeros", "ones", "full", "eye", "arange", "linspace"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_strided"),
    *("rand", "randn", "randint", "randperm", "tril_indices", "triu_indices"),
)
_TENSOR_FACTORIES = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
# Megatron's warnings on a machine without a GPU, where its forked generators are the CPU generator by construction.
_EXPECTED_WARNINGS = (
    "CPU RNG state changed within GPU RNG context",
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
)
_installed = False


def has_cuda() -> bool:
    return torch.cuda.is_available()


def kept_generators() -> contextlib.AbstractContextManager[None]:
    """Return a context that restores torch's generators at its end, without initialising an unused device."""
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else [])


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else _CPU


def device_uuid(of: torch.device | None = None) -> str:
    """Return the UUID of this GPU, as CUDA_VISIBLE_DEVICES takes it; empty on CPU."""
    of = of or device()
    return f"GPU-{torch.cuda.get_device_properties(of).uuid}" if of.type == "cuda" else ""


def gpu_name() -> str:
    return torch.cuda.get_device_name() if has_cuda() else ""


def peak_memory_bytes() -> int:
    """Return the peak of torch's GPU memory, or on CPU of the process's resident memory."""
    if has_cuda():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_memory_bytes() -> int | None:
    """Return the free memory of this process's GPU; None on CPU."""
    return torch.cuda.mem_get_info()[0] if has_cuda() else None


def synchronize(of: torch.device) -> None:
    """Wait for all kernels launched on this device; no-op on CPU."""
    if of.type == "cuda":
        torch.cuda.synchronize(of)


def free_shared_memory() -> None:
    """Release GPU memory that other processes no longer use."""
    if has_cuda():
        torch.cuda.ipc_collect()


def empty_cache() -> None:
    """Return cached GPU memory to the driver, for other processes."""
    torch.cuda.empty_cache()


def current_and_new_stream() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.current_stream(), torch.cuda.Stream()


def on_stream(stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.stream(stream)


def device_rng_states() -> list[torch.Tensor]:
    """Return the CPU generator's state and, on CUDA, the device generator's."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if has_cuda() else states


def restore_device_rng_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def install(local_rank: int = 0) -> None:
    """Set the CUDA device, or without one replace CUDA by the CPU, before `megatron` is imported."""
    global _installed
    if has_cuda():
        torch.cuda.set_device(local_rank)
        return
    if _installed:
        return
    _installed = True
    for expected in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=expected)
    # Some of these are logged instead, once per weight.
    random_log = logging.getLogger("megatron.core.tensor_parallel.random")
    random_log.addFilter(lambda record: record.getMessage() not in _EXPECTED_WARNINGS)
    # Megatron marks its fusions with torch.compile. Here they run as they are written: compiling them would need a C++
    # toolchain, and loading the compiler doubles the time to import Megatron.
    torch.compile = lambda model=None, **_: model if model is not None else lambda function: function
    _wrap_device_arguments()
    _stand_in_for_torch_cuda()
    _complete_gloo()


def _as_cpu(requested: Any) -> Any:
    """Map a device argument: cuda in any spelling (string, torch.device, ordinal) becomes the CPU."""
    if requested is None:
        return None
    if isinstance(requested, int):
        return _CPU
    named = torch.device(requested)
    return _CPU if named.type == "cuda" else named


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that takes a device, by position or by keyword, to read "cuda" as "cpu"."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = _as_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)  # for copies to a GPU; torch refuses it without a driver
        args = tuple(_as_cpu(arg) if isinstance(arg, str | torch.device) else arg for arg in args)
        return function(*args, **kwargs)

    return wrapped


def _replace(owner: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)


def _wrap_device_arguments() -> None:
    # torch's device context looks up constructors by identity in a list that is built once: build it now, with the
    # plain functions that the wrappers call.
    _device_constructors()
    _replace(DeviceContext, __init__=_on_cpu(DeviceContext.__init__))
    # Wrapping each function once costs nothing measurable and also acts inside threads and backward passes, which a
    # TorchFunctionMode does not.
    _replace(torch, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})
    tensor = torch.Tensor
    _replace(tensor, **{name: _on_cpu(getattr(tensor, name)) for name in _TENSOR_FACTORIES})
    for owner in (tensor, torch.nn.Module):
        _replace(owner, to=_on_cpu(owner.to), cuda=lambda self, *_args, **_kwargs: self)
    plain_type = tensor.type

    def cuda_type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizer compares the type's name with "torch.cuda.FloatTensor".
        result = plain_type(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    _replace(tensor, type=cuda_type_name, record_stream=lambda self, _stream: None)


def _always(result: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: result


class _Event:
    """An event on a device where all work is already done."""

    __init__ = record = wait = synchronize = _always(None)
    query = _always(True)
    elapsed_time = _always(0.0)


class _Stream(contextlib.nullcontext):  # type: ignore[type-arg]
    """The only stream of a device that runs everything in order."""

    cuda_stream = priority = 0
    device = _CPU
    enter_result = None
    __init__ = _always(None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    wait_event = wait_stream = synchronize = _always(None)
    record_event = _always(_Event())
    query = _always(True)
    priority_range = staticmethod(_always((0, 0)))


def _stand_in_for_torch_cuda() -> None:
    cuda, stream = torch.cuda, _Stream()
    generator = {
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
    }
    _replace(cuda, **generator)
    _replace(cuda.random, **generator)
    _replace(cuda, **dict.fromkeys(("manual_seed", "manual_seed_all"), torch.default_generator.manual_seed))
    memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    results: dict[Any, tuple[str, ...]] = {
        _CPU: ("current_device",),
        0: ("device_count", *memory),
        None: ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "set_stream"),
        stream: ("current_stream", "default_stream"),
        contextlib.nullcontext(): ("stream", "device"),
    }
    for result, names in results.items():
        _replace(cuda, **{name: _always(result) for name in names})
    _replace(cuda, Stream=_Stream, Event=_Event, is_current_stream_capturing=_always(False))
    _replace(cuda.nvtx, range_push=_always(None), range_pop=_always(None))


def _complete_gloo() -> None:
    """Add nccl's extras to gloo: split sizes as tensors, and gather and scatter of uneven parts."""
    plain_all_to_all, plain_all_gather = dist.all_to_all_single, dist.all_gather
    plain_reduce_scatter = dist.reduce_scatter

    def all_to_all_single(
        output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
    ):
        received, sent = (
            sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes
            for sizes in (output_split_sizes, input_split_sizes)
        )
        return plain_all_to_all(output, input, received, sent, group, async_op)

    def all_gather(tensor_list, tensor, group=None, async_op=False):
        if _are_even(tensor_list, async_op):
            return plain_all_gather(tensor_list, tensor, group, async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for source, part in enumerate(tensor_list):
            dist.broadcast(part, group=group, group_src=source)
        return None

    def reduce_scatter(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if _are_even(input_list, async_op):
            return plain_reduce_scatter(output, input_list, op, group, async_op)
        for target, part in enumerate(input_list):
            total = part.clone()
            dist.all_reduce(total, op, group)
            if target == dist.get_rank(group):
                output.copy_(total)
        return None

    _replace(dist, all_to_all_single=all_to_all_single, all_gather=all_gather, reduce_scatter=reduce_scatter)


def _are_even(parts: list[torch.Tensor], async_op: bool) -> bool:
    even = len({part.shape for part in parts}) == 1
    if async_op and not even:
        raise NotImplementedError("gloo has no asynchronous gather or scatter of parts of different shapes")
    return even
