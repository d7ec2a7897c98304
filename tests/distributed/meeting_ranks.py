"""One rank of a combination of the meeting matrix: the workers of its models, which live from call to call.

A run gives each model processes of its own. Here its models share those of the pool, and with them the groups of the
layout, by which all models of a run are cut; the driver's calls come one after the other either way.
"""

from __future__ import annotations

import io
import os
import pickle
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import torch

from nemo_rl_mcore.config import MegatronConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.training.train_step import _OpenStep
from nemo_rl_mcore.workers.policy_worker import MegatronPolicyWorker

_workers: dict[str, MegatronPolicyWorker] = {}
_mistakes = ExitStack()
_sizes: tuple[int | None, ...] | None = None
"""Those of the layout whose groups there are."""


class _Pickler(pickle.Pickler):
    """Sends tensors as arrays, as `workers.tensor_transport` does: else the driver would import Megatron."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.detach().numpy(),)
        return NotImplemented


def packed(value: object) -> bytes:
    """A value on its way between driver and rank, which `pickle.loads` reads."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def build(name: str, arguments: bytes) -> None:
    """Build the worker of a model; groups of the same layout are taken over, and the random state begins anew."""
    global _sizes
    import tiny
    from megatron.core import parallel_state

    from nemo_rl_mcore.megatron import parallel_groups

    config, options = pickle.loads(arguments)
    sizes = _layout(config.megatron_cfg)
    if sizes != _sizes or not parallel_state.model_parallel_is_initialized():
        tiny.leave()
        parallel_groups.initialize(config.megatron_cfg, options["seed"])
        _sizes = sizes
    with patch.object(parallel_groups, "initialize", _seed_again):
        _workers[name] = MegatronPolicyWorker(config, **options)


def _layout(config: MegatronConfig) -> tuple[int | None, ...]:
    return (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.virtual_pipeline_model_parallel_size,
        config.expert_model_parallel_size,
    )


def _seed_again(config: MegatronConfig, seed: int) -> None:
    from nemo_rl_mcore.megatron import parallel_groups

    parallel_groups._seed_everything(seed, spread_experts=config.expert_model_parallel_size > 1)


def call(name: str, method: str, arguments: bytes) -> bytes:
    """Call a method of a model's worker."""
    return packed(getattr(_workers[name], method)(**pickle.loads(arguments)))


def call_own(name: str, method: str, arguments: list[bytes]) -> bytes:
    """Call a method of a model's worker with this rank's own arguments, of those of all ranks."""
    return call(name, method, arguments[int(os.environ["RANK"])])


def drop(name: str) -> None:
    """End a model; the groups stay for the next one of this layout."""
    _workers.pop(name, None)


def leave() -> None:
    """End every model; the pool then ends the groups as well."""
    for name in list(_workers):
        drop(name)


def whole_parameters(name: str) -> dict[str, Any]:
    """The parameters of a model that this rank holds alone."""
    import tiny

    return {key: value.float().numpy() for key, value in tiny.parameters(_workers[name]).items()}


def differences(name: str, whole: dict[str, Any]) -> dict[str, float]:
    """The largest difference of this rank's part of each parameter from the whole parameter that is given."""
    import tiny
    from megatron.core import parallel_state

    worker, rank = _workers[name], parallel_state.get_tensor_model_parallel_rank()
    found: dict[str, float] = {}
    for key, value in worker.backend.chunks[0].named_parameters():
        of_all = f"0.{tiny.global_name(key, worker.policy)}"
        wanted = tiny.shard_of(torch.from_numpy(whole[of_all]), value, rank, key)
        found[of_all] = float((value.detach().float() - wanted).abs().max())
    return found


# Mistakes that the matrix must catch.


def make_mistake(name: str) -> None:
    """Make a mistake in this rank from now on."""
    _mistakes.enter_context(MISTAKES[name]())


def mend() -> None:
    """Make no mistake any more."""
    _mistakes.close()


def rows_sorted_singly() -> AbstractContextManager[Any]:
    """Cuts that sort and pack rows by themselves, whichever sample they belong to."""

    def samples(self: BatchedDataDict, _rows_per_sample: int = 1) -> list[range]:
        return [range(row, row + 1) for row in range(self.size)]

    return patch.object(BatchedDataDict, "samples", samples)


def schedule_counts_rows() -> AbstractContextManager[Any]:
    """A schedule that a step of pairs advances by twice its samples."""
    return patch.object(_OpenStep, "samples", property(lambda step: step.gbs))


MISTAKES = {made.__name__: made for made in (rows_sorted_singly, schedule_counts_rows)}
